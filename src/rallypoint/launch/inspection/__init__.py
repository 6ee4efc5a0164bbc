"""What other programs may ask of a running job: where it is found, what it answers, what is seen.

The agent's part costs it next to nothing until somebody asks: entries.py is all that is imported at
its start. Whatever takes time (reading /proc, asking for stacks) is done by the program that asks.
"""
