"""Rallypoint: start, gather, connect and keep alive the processes of a distributed training job.

The public face. Names are loaded on first use, so that the launcher, which imports this package
too, pays for none of them.
"""
