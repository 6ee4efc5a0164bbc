"""Rendezvous for Python programs: torch's handlers and registry, and those kept in any store."""
