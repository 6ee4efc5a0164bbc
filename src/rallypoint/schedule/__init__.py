"""Collective algorithms as programs: built here, run elsewhere. Pure: no I/O, clock or threads.

choose   custom            which program serves a call | a program of the user's own
proof  | cost              is it right | how long does it take
catalogue   algorithms     all built-in algorithms | one family per file
encode   execution   widen what is made of a program: words, an order of its steps, more lanes
program   collective       what a program is | what each collective promises
"""
