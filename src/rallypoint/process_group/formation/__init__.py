"""How groups form and end: ranks meet at a store, connect, and leave. No calls are made here."""
