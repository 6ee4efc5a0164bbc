"""Collective algorithms as programs: built here, run elsewhere. Pure: no I/O, clock or threads.

    choose   custom              which program serves a call | a program of the user's own
    proof  | cost                is it right | how long does it take
    catalogue   algorithms       all built-in algorithms | one family per file
    encode      execution        a program as words | as steps in some order
    program                      what a program is

Each package knows only what is below it.
"""
