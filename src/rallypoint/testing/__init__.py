"""Tools that test clusters of several hosts on one machine, for our own tests and users'."""
