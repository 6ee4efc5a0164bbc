"""Whether a job of several nodes can start here, and what prevents it.

    collect.py, paths.py ------------> NodeFacts of each node ---\
    probe.py ------------------------> Probe of each pair --------+--> checks/ --> Finding
    quick.py: the cheap part of it, for an error that is about to be raised

A Finding says where something is wrong, what it is, and what to do. Facts are frozen data that
travel as JSON; the checks are pure. cli/doctor/ collects the facts of several nodes.
"""
