"""`rallypoint run --on ray`: a launcher on each of several nodes of a Ray cluster.

What cli/remote does for the hosts of --hosts, with actors in the place of ssh. Only this room
imports ray, and only when it is asked for.
"""
