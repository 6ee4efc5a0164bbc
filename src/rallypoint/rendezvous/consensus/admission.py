"""Which agents belong to a job: those started for it with the same options that have not ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from rallypoint.rendezvous.consensus.messages import Setup
from rallypoint.rendezvous.job.reports import Join


def why_not(ours: Setup, join: Join) -> str:
    """What its user has to change; empty if nothing."""
    limits = ours.limits
    if limits.is_fixed:
        return _why_not_fixed(ours, join)
    if join.run_id != ours.run_id:
        return f"the job is {ours.run_id!r}, not {join.run_id!r}; pass the same --rdzv-id"
    if join.attempt != ours.attempt:
        return (
            f"this node was started for attempt {join.attempt} of the job, which is now in "
            f"attempt {ours.attempt}; end the processes left from the older attempt"
        )
    if (join.min_nodes, join.max_nodes) != (limits.min_nodes, limits.max_nodes):
        return (
            f"--nnodes is {limits.min_nodes}:{limits.max_nodes} in the job but"
            f" {join.min_nodes}:{join.max_nodes} on this node; pass the same value"
        )
    return ""


def _why_not_fixed(ours: Setup, join: Join) -> str:
    count = ours.limits.max_nodes
    if join.max_nodes != count:
        return f"--nnodes is {join.max_nodes} here and {count} on node 0; pass the same value"
    if join.run_id != ours.run_id:
        return (
            f"the job at {ours.endpoints[0]} is {ours.run_id!r}, not {join.run_id!r}; pass the "
            "same --rdzv-id on all nodes, and each job its own --master-port"
        )
    return ""


MOST = 1 << 16  # several times as many as a job has members


class EndedAgents(Collection[str]):
    """Agents known to be dead or gone, by key, which no later process has; the latest are kept.

    Forgetting one is safe: it would only be waited for longer, and no later list of members
    contains it.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._keys = dict.fromkeys(keys)

    def add(self, key: str) -> None:
        """That agent has ended."""
        self._keys[key] = None
        if len(self._keys) > MOST:
            del self._keys[next(iter(self._keys))]

    def discard(self, key: str) -> None:
        """It was heard again: only a connection had ended."""
        self._keys.pop(key, None)

    def __contains__(self, key: object) -> bool:
        """Whether that agent has ended."""
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        """Oldest first."""
        return iter(self._keys)

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._keys)
