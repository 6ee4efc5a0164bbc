"""Which agents belong to a job: those started for it with the same options that have not ended."""

from __future__ import annotations

from rallypoint.rendezvous.consensus.messages import Setup
from rallypoint.rendezvous.job.reports import Join


def refusal_reason(ours: Setup, join: Join) -> str:
    """What its user has to change; empty if nothing."""
    limits = ours.limits
    if limits.is_fixed and join.max_nodes != limits.max_nodes:
        return (
            f"--nnodes is {join.max_nodes} here and {limits.max_nodes} on node 0; pass the same "
            "value"
        )
    if limits.is_fixed and join.run_id != ours.run_id:
        return (
            f"the job at {ours.endpoints[0]} is {ours.run_id!r}, not {join.run_id!r}; pass the "
            "same --rdzv-id on all nodes, and each job its own --master-port"
        )
    if join.run_id != ours.run_id:
        return f"the job is {ours.run_id!r}, not {join.run_id!r}; pass the same --rdzv-id"
    if not limits.is_fixed and join.attempt != ours.attempt:
        return (
            f"this node was started for attempt {join.attempt} of the job, which is now in "
            f"attempt {ours.attempt}; end the processes left from the older attempt"
        )
    node_range = (limits.min_nodes, limits.max_nodes)
    if not limits.is_fixed and (join.min_nodes, join.max_nodes) != node_range:
        return (
            f"--nnodes is {limits.min_nodes}:{limits.max_nodes} in the job but"
            f" {join.min_nodes}:{join.max_nodes} on this node; pass the same value"
        )
    return ""


_MOST_KEPT = 1 << 16  # several times as many as a job has members


class EndedAgents(dict[str, None]):
    """Agents known to be dead or gone, by key, which no later process has; the latest are kept.

    Forgetting one is safe: it would only be waited for longer, and no later list of members
    contains it.
    """

    def add(self, key: str) -> None:
        """That agent has ended."""
        self[key] = None
        if len(self) > _MOST_KEPT:
            del self[next(iter(self))]

    def discard(self, key: str) -> None:
        """It was heard again: only a connection had ended."""
        self.pop(key, None)
