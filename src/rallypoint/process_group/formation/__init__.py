"""How groups come to be and end: ranks meet at a store, connect, leave; no calls are made here."""
