"""Agreements that etcd keeps: what a job writes there, the voter and the link that do it."""
