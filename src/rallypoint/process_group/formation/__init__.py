"""How groups form and end: ranks find each other through a store, connect, and leave. No calls are
made here.
"""
