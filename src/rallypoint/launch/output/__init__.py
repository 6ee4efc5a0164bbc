"""What people and programs see of a job: workers' output and files, status, events, failures.

Nothing here makes the agent's loop wait: what may block is written by a thread of its own.
"""
