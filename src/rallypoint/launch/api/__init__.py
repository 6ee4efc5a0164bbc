"""Launching and rendezvous from Python, with torch's names: elastic_launch, spawn, handlers."""
