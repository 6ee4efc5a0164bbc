"""The agent of one node: its loop, what it decides, its guardian and its workers."""
