"""Every call of a job's workers for some seconds: node by node, and of all nodes."""
