"""`rallypoint doctor`: gathers facts of all nodes, and tells what the checks find in them.

    examiner.py --orders--> node.py on each node --answers--> ClusterFacts --> checks --> report.py

Orders are the same for all nodes; what carries them differs (links.py): the standard input of what
ssh started (--hosts), a connection to the endpoint (meeting.py), or a call in this process.
"""
