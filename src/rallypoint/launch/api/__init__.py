"""Launching and meeting from Python, with torch's names: elastic_launch, spawn, handlers."""
