"""Where an agent gets its rounds from: itself, a fixed node 0, other agents, or somebody's package.

`source` is the interface; one file for each way.
"""
