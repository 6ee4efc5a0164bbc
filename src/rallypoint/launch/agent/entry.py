"""The agent's entry in the list by which programs find the agents of this machine."""

from __future__ import annotations

import time

from rallypoint.launch.inspection.entries import RUN_DIRECTORY, Entry, describe_agent
from rallypoint.launch.job import Job
from rallypoint.launch.output.terminal import say


def make_entry(job: Job, logs: str) -> Entry | None:
    """Register this agent for programs; None if that is not possible, which harms nothing else."""
    rendezvous, nodes = job.rendezvous, job.nodes
    if rendezvous is not None:
        meets_at = ",".join(map(str, rendezvous.endpoints))
        nnodes = f"{rendezvous.min_nodes}:{rendezvous.max_nodes}"
    else:
        meets_at = f"{nodes.master_addr}:{nodes.master_port}" if nodes.count > 1 else ""
        nnodes = str(nodes.count)
    try:
        return Entry(
            describe_agent(
                run_id=job.run_id,
                meets_at=meets_at,
                command=job.command,
                logs=logs,
                began=time.time(),
                nnodes=nnodes,
            )
        )
    except OSError as error:
        if directory := job.environ.get(RUN_DIRECTORY):
            say(
                f"warning: cannot use {RUN_DIRECTORY}={directory} ({error.strerror or error}), so"
                " `rallypoint ps` and other commands will not find this job."
            )
        return None
