"""Whether a job of several nodes can begin here, and what keeps it from doing so.

    look.py ----> NodeFacts of each node ---\\
    probe.py ---> Probe of each pair --------+--> checks/ --> Finding: what, where, and the advice
    quick.py: the cheap part of it, for an error that is about to be told

Facts are frozen data that travel as JSON; the checks are pure. Who gathers the facts of several
nodes is cli/health/'s business.
"""
