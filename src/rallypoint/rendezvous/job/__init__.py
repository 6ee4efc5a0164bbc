"""What a job decides, whoever decides it: who is in a round, when it must stop, what follows.

Pure: no clock, no connection, one caller. How agents agree on who decides is `consensus`.
"""
