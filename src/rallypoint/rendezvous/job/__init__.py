"""What a job decides: which nodes are in a round, when it must stop, what follows.

Pure: no clock, no connection, one caller. `consensus` is how agents agree on who decides.
"""
