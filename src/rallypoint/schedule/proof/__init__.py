"""The meaning of a program and its correctness: it runs on values or on symbols; nothing is
timed.
"""
