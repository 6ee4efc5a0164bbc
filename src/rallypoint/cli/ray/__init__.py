"""`rallypoint run --on ray`: a launcher on each of several nodes of a Ray cluster.

Like cli/remote for the hosts of --hosts, but with actors instead of ssh. Only this package imports
ray, and only when it is asked for.
"""
