"""Collective algorithms as programs: built here, run elsewhere. Pure: no I/O, clock or threads."""
