"""What a node tells of its ranks once a second, for those who follow a job: data, and as a line.

It is what costs little to read: no stacks and no threads. Counters only grow, so whoever compares
two updates knows what was done in between. Times are of the node's own monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from rallypoint.base.errors import ControlMessageError
from rallypoint.base.job_so_far import JobSoFar
from rallypoint.base.json_records import from_row, to_row
from rallypoint.base.record import Record
from rallypoint.base.recorded_call import GroupCounts, RecordedGroup
from rallypoint.diagnosis.stragglers import RankReading

_KEY = "update"
_SQUARE_NS2 = 10**10  # the unit of squares of waits: a tenth of a millisecond, squared


class GroupNames(Record, kw_only=True):
    """A group of a node's ranks, as RecordedGroup."""

    name: str
    key: str
    members: str
    backend: str


class GroupUpdate(Record, kw_only=True):
    """What a rank has done in a group in all, as GroupCounts, in numbers that JSON can hold.

    Attributes:
        group: the place of its names among the node's `groups`.
        calls: -1: nothing is counted.
        running_ms: how long the collective that is running has lasted; -1: none is.
    """

    group: int
    calls: int
    transfers: int
    kib: int
    waited_us: int
    squares: int
    running_ms: int
    peers: tuple[int, ...]

    @classmethod
    def of(cls, group: int, counts: GroupCounts | None, now_ns: int) -> GroupUpdate:
        """A group's counters at that moment."""
        if counts is None:
            counts = GroupCounts(calls=-1, transfers=0, bytes=0, waited_ns=0, waited_squared_ns2=0)
        since_ns = counts.running_since_ns
        return cls(
            group=group,
            calls=counts.calls,
            transfers=counts.transfers,
            kib=counts.bytes >> 10,
            waited_us=counts.waited_ns // 1000,
            squares=counts.waited_squared_ns2 // _SQUARE_NS2,
            running_ms=max(0, now_ns - since_ns) // 1_000_000 if since_ns else -1,
            peers=counts.peers,
        )

    def counts(self, now_ms: int) -> GroupCounts | None:
        """The counters, at that moment."""
        if self.calls < 0:
            return None
        return GroupCounts(
            calls=self.calls,
            transfers=self.transfers,
            bytes=self.kib << 10,
            waited_ns=self.waited_us * 1000,
            waited_squared_ns2=self.squares * _SQUARE_NS2,
            running_since_ns=0 if self.running_ms < 0 else (now_ms - self.running_ms) * 1_000_000,
            peers=self.peers,
        )


class RankUpdate(Record, kw_only=True):
    """A rank.

    Attributes:
        pid: its process; 0: not started yet.
        state: that of its main thread, as in `facts.Thread`; empty: there is none.
        end: how it has ended: ``"killed by SIGKILL"``; empty: it has not.
        cpu_ms: how long it has run on a core in all.
        starved_ms: how long its main thread was ready and had no core in all; -1: not known.
        group: of the current call, or else the last one, among the node's `groups`; -1: there is
            no call.
        number: of that call.
        is_running: it is in that call.
        for_ms: since it began that call or, if that is over, left it.
        site: the line of its program; empty if that is not known.
        counts: what it has done in all, in some groups.
        step: its last step; None: not known.
        step_ms_ago: the time since that step.
    """

    rank: int
    pid: int
    state: str
    end: str
    cpu_ms: int
    starved_ms: int
    rss_kb: int
    group: int
    operation: str
    number: int
    is_running: bool
    for_ms: int
    site: str
    counts: tuple[GroupUpdate, ...]
    step: int | None
    step_ms_ago: int


class StepsUpdate(Record, kw_only=True):
    """The steps of those of a node's ranks that know most of them, as RecordedSteps.

    Attributes:
        left_s: how long the rest will take; None: not known.
    """

    step: int
    total: int | None
    left_s: int | None
    source: str
    values: Mapping[str, str]


class NodeUpdate(Record, kw_only=True):
    """A node, at one moment.

    Attributes:
        now_ms: the moment.
        phase, round, nodes, world_size: as `requests.AgentStatus`.
        uptime_ms: of its agent.
        groups: those of its ranks.
        so_far: what has happened in the job; None: another node tells it.
    """

    node_rank: int
    host: str
    now_ms: int
    uptime_ms: int
    phase: str
    news: str
    round: int
    nodes: int
    world_size: int
    steps: StepsUpdate | None
    groups: tuple[GroupNames, ...]
    ranks: tuple[RankUpdate, ...]
    so_far: JobSoFar | None = None

    def reading(self, rank: RankUpdate) -> RankReading:
        """A rank's counters."""
        return RankReading(
            now_ns=self.now_ms * 1_000_000,
            groups=tuple(
                _group(self.groups[each.group], each.counts(self.now_ms)) for each in rank.counts
            ),
            step=rank.step,
        )


def to_line(update: NodeUpdate) -> str:
    """The line, of ASCII."""
    return json.dumps({_KEY: to_row(update)}, separators=(",", ":"))


def from_line(line: Mapping[str, object]) -> NodeUpdate | None:
    """Read a line's object; None: it is another kind of line, or not valid."""
    if _KEY not in line:
        return None
    try:
        update = from_row(NodeUpdate, line[_KEY])
    except ControlMessageError:
        return None
    places = range(-1, len(update.groups))
    is_valid = all(
        rank.group in places and all(each.group in places[1:] for each in rank.counts)
        for rank in update.ranks
    )
    return update if is_valid else None


def _group(names: GroupNames, counts: GroupCounts | None) -> RecordedGroup:
    return RecordedGroup(
        name=names.name,
        key=names.key,
        members=names.members,
        backend=names.backend,
        has_left=False,
        queued=0,
        calls=(),
        transfers=(),
        counts=counts,
    )
