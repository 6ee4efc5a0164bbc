"""Agreements that etcd keeps: what a job writes there, and the voter and the thread that do it."""
