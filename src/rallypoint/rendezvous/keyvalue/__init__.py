"""Agreements that a keeper outside the agents holds: etcd, or any store with compare-and-set.

voter.py says what a job reads and writes there, rules.py when, link.py does it in a thread;
client.py is the interface of a keeper, with etcd_client.py and store_client.py as the two kinds.
"""
