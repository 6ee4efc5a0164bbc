"""`rallypoint run --hosts`: launchers on several hosts, started and ended by one command.

    starter.py --ssh--> remote_node.py on host a --> rallypoint run --nnodes 2 --node-rank 0 ...
               --ssh--> remote_node.py on host b --> rallypoint run --nnodes 2 --node-rank 1 ...

hosts.py reads which hosts, plan.py derives what their launchers are given, job_on_hosts.py decides,
and starter.py carries the decisions out over connections (host_connection.py). The launchers are
ordinary ones, and connect as if each had been started by hand on its host.
"""
