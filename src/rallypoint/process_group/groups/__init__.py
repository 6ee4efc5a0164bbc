"""Which ranks are in a group, and what `group` and ranks mean in arguments and errors."""
