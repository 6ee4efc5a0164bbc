"""The agent: starts the workers of this machine, watches them, and ends everything it started."""
