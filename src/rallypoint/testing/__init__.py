"""Tools for tests of a cluster, for our own tests and for users': several hosts on one machine."""
