"""Agreements that a keeper outside the agents holds: etcd, or any store with compare-and-set.

keeper.py says what a job keeps there, and which requests a keeper carries out (etcd_client.py,
store_client.py); key_value_register.py defines which agent may write when. key_value_voter.py turns
an agent's messages into requests, which key_value_link.py has carried out in a thread.
"""
