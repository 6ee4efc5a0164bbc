"""What people and programs see of a job: workers' output and files, status, events, failures.

Nothing here blocks the agent's loop: what may block is written by a separate thread.
"""
