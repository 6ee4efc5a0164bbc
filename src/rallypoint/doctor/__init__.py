"""Whether a job of several nodes can start here, and what prevents it.

    collect.py ----> NodeFacts of each node ---\
    probe.py ---> Probe of each pair --------+--> checks/ --> Finding: what, where, and the advice
    quick.py: the cheap part of it, for an error that is about to be raised

Facts are frozen data that travel as JSON; the checks are pure. cli/doctor/ collects the facts of
several nodes.
"""
