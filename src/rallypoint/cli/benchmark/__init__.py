"""`rallypoint bench OPERATION`: our collectives and messages beside those of other libraries.

Start reading at contest.py. Each contender is a crew (crew.py) of processes that run the same
script (worker.py), started in its library's own way (contenders.py).
"""
