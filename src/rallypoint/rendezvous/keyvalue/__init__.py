"""Agreements that a keeper outside the agents holds: etcd, or any store with compare-and-set.

key_value_voter.py says what a job reads and writes there, key_value_rules.py when;
key_value_link.py does it in a thread. key_value_client.py is the interface of a keeper, with
etcd_client.py and store_client.py as the two kinds.
"""
