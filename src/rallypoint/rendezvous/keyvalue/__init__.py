"""Agreements that a keeper outside the agents holds: etcd, or any store that can compare and set.

voter.py says what a job reads and writes there, rules.py when, link.py does it in a thread; what a
keeper must be able to do is client.py, with etcd_client.py and store_client.py as the two kinds.
"""
