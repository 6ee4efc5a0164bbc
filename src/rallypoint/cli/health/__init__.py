"""`rallypoint doctor`: gathers facts from all nodes, and reports what the checks find in them.

    examiner.py --orders--> node.py on each node --answers--> ClusterFacts --> checks --> report.py

The orders are the same for all nodes; how they travel differs (links.py): through the standard
input of a process that ssh started (--hosts), through a connection to the endpoint (meeting.py), or
as a call in this process.
"""
