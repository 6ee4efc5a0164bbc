"""A worker's calls, by group: data only, read from its flight record.

Times are of the monotonic clock of the worker's machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from rallypoint.base.record import Record


class RecordedCall(Record, kw_only=True):
    """One operation of a worker.

    Attributes:
        number: of the operations of its kind in its group, from 0.
        operation: its name, e.g. ``"all_reduce"``, ``"recv"``.
        state: "running", "done", or "failed".
        since_ns: when it began, by the machine's monotonic clock.
        root: a rank in the group; of a send or recv: the tag.
        count: items of a block.
        peer: of a send or recv: the other rank in the group, or -1 for any; of a collective None.
        site: the line of the program that waits for it, if it has waited for some time.
        came_tag: of a recv that has waited for some time: the tag of the oldest message from there
            that is never received; None: there is none, or it is not known.
        ended_ns: when it ended, by the same clock; 0: it has not, or that is not known.
        shape: of what it works on, where the backend reports it; else only `count` is known.
    """

    number: int
    operation: str
    state: str
    since_ns: int
    dtype: str
    operator: str
    root: int
    count: int
    peer: int | None = None
    site: str = ""
    came_tag: int | None = None
    ended_ns: int = 0
    shape: tuple[int, ...] = ()

    @property
    def took_s(self) -> float:
        """Its duration; 0 if it has not ended, or that is not known."""
        return (self.ended_ns - self.since_ns) / 1e9 if self.ended_ns else 0.0


class GroupCounts(Record, kw_only=True):
    """What a worker has done in one group in all: numbers that only grow.

    Two of them tell what was done in between, however much that was.

    Attributes:
        calls: collectives begun.
        transfers: sends and receives begun.
        bytes: of the blocks of these; 0 for other backends, which do not tell.
        waited_ns: for how long calls could not continue without others, up to the last call that
            has ended. Of other backends: for how long Python has waited for works, in all groups of
            such backends together, counted in the first one.
        waited_squared_ns2: the sum of the squares of these waits; it tells many that are alike from
            a few long ones.
        running_since_ns: when the collective began that is running; 0: none is, or not known.
        peers: ranks in the group with which it has lately exchanged messages.
    """

    calls: int
    transfers: int
    bytes: int
    waited_ns: int
    waited_squared_ns2: int
    running_since_ns: int = 0
    peers: tuple[int, ...] = ()


class RecordedGroup(Record, kw_only=True):
    """What a worker was in, in one group.

    Attributes:
        name: what people call it.
        key: the same on all members.
        members: their global ranks, in the order of their ranks in it, e.g. ``"0-3,7"``; or empty.
        has_left: the worker has left it.
        queued: collectives that were begun in the background and are not done.
        calls: its last collectives, the latest last.
        transfers: sends and receives that continue, or failed.
        backend: the library that carries the calls out, e.g. ``"gloo"``.
        is_complete: whether sends and receives are recorded as well.
        transfers_begun: how many sends and receives there have been, also those that are done.
        counts: what it has done in all; None: its writer counts nothing.
    """

    name: str
    key: str
    members: str
    has_left: bool
    queued: int
    calls: tuple[RecordedCall, ...]
    transfers: tuple[RecordedCall, ...]
    backend: str = "rallypoint"
    is_complete: bool = True
    transfers_begun: int = 0
    counts: GroupCounts | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' global ranks in the order of the group; empty if unknown."""
        return _ranks_in(self.members)

    def global_rank(self, rank: int) -> int | None:
        """The global rank of a rank in the group, if it is known."""
        return self.ranks[rank] if 0 <= rank < len(self.ranks) else None


def current_groups(groups: Sequence[RecordedGroup]) -> list[RecordedGroup]:
    """A worker's groups, without those that it left and formed anew."""
    open_names = {group.name for group in groups if not group.has_left}
    return [group for group in groups if not (group.has_left and group.name in open_names)]


@lru_cache(maxsize=1024)
def _ranks_in(text: str) -> tuple[int, ...]:
    ranges = (part.partition("-") for part in text.split(",") if part)
    return tuple(
        rank for first, _, last in ranges for rank in range(int(first), int(last or first) + 1)
    )
