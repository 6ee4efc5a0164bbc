"""The meaning of a program and its correctness: run on values, or on symbols; nothing is timed."""
