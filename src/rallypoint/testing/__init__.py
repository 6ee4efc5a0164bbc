"""What tests of a cluster need, for our own and for users': hosts on one machine."""
