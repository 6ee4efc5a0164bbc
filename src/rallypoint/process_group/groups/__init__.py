"""Who is in which group, what `group` and ranks in arguments mean, and whom an error names."""
