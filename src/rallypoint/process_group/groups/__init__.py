"""Which ranks are in a group, what `group` and ranks in arguments mean, and whom an error names."""
