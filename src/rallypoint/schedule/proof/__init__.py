"""What a program means and whether it is right: run slowly, or on symbols; nothing is timed."""
