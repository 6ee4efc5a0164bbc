"""What other programs can ask of a running job: where it is found, what it answers, what is seen.

The agent's part costs almost nothing until somebody asks: it imports only entries.py at its start.
The asking program does all that takes time (reading /proc, asking for stacks).
"""
