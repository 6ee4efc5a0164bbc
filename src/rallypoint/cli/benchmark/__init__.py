"""`rallypoint bench OPERATION`: our collectives and messages, and those of others, side by side.

contest.py is the whole story. Each contender is a crew (crew.py) of processes that run the same
script (worker.py), started as its library wants to be (contenders.py).
"""
