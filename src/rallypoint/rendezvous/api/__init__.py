"""Torch's rendezvous interface and registry, for Python programs (more handlers: launch/api)."""
