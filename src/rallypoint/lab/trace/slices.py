"""A job's calls as slices on tracks, by one clock: what to draw, independent of the file format.

Each rank has a track for each of its groups, and one for its sends and receives there. Slices of a
track never overlap: concurrent calls get their own tracks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rallypoint.base.collective import reduces, root_argument
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.lab.trace.clocks import JOINT, ClockOf, Interval, Offset, align
from rallypoint.launch.inspection.node_trace import JobTrace, NodeTrace, WorkerTrace

_MOST_FOR_CLOCKS = 5000  # collectives of a node

Args = dict[str, str | int]


@dataclass(slots=True, kw_only=True)
class Slice:
    """One call of one rank.

    Attributes:
        begin_ns: on the trace's clock, which begins with its first call.
        end_ns: at least 1 later; None if it has not ended.
        joins: equal for the calls of all ranks in the same collective; None for other calls.
        is_exact: whether its times are exact.
    """

    rank: int
    name: str
    begin_ns: int
    end_ns: int | None
    args: Args
    joins: tuple[str, int, str] | None
    is_exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Slices of one rank in the order of time, without overlaps."""

    rank: int
    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A rank, as the trace names it.

    Attributes:
        clock: how its clock was aligned with the trace's.
    """

    rank: int
    host: str
    pid: int
    clock: Offset


@dataclass(slots=True, kw_only=True)
class Drawing:
    """A trace that is ready to be written.

    Attributes:
        flows: the slices of each collective of more than one rank, in the order of entry.
        clocks: the clocks by node rank.
    """

    lanes: list[Lane] = field(default_factory=list)
    tracks: list[Track] = field(default_factory=list)
    flows: list[Sequence[Slice]] = field(default_factory=list)
    clocks: dict[int, Offset] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """The number of calls."""
        return sum(len(track.slices) for track in self.tracks)


def draw(trace: JobTrace) -> Drawing:
    """Lay out the calls of a job."""
    drawing = Drawing()
    workers = [(worker, _keyed(worker.groups)) for node in trace.nodes for worker in node.workers]
    by_worker = {id(worker): groups for worker, groups in workers}
    offsets = align(_clocks(trace.nodes, by_worker))
    origin_ns = min(_begins(trace.nodes, offsets), default=0)
    joined: dict[tuple[str, int, str], list[Slice]] = {}
    for node, offset in zip(trace.nodes, offsets, strict=True):
        drawing.clocks[node.node_rank] = offset
        for worker in node.workers:
            lane = Lane(rank=worker.rank, host=node.host, pid=worker.pid, clock=offset)
            drawing.lanes.append(lane)
            for key, group in by_worker[id(worker)]:
                for track in _tracks(worker, key, group, offset.ns + origin_ns):
                    drawing.tracks.append(track)
                    for each in track.slices:
                        if each.joins is not None:
                            joined.setdefault(each.joins, []).append(each)
    for slices in joined.values():
        if len(slices) > 1:
            slices.sort(key=lambda each: (each.begin_ns, each.rank))
            drawing.flows.append(slices)
            _say_who_was_last(slices)
    drawing.lanes.sort(key=lambda lane: lane.rank)
    return drawing


def lay_side_by_side(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Distribute slices over as few rows as possible without overlaps."""
    rows: list[list[Slice]] = []
    for each in sorted(slices, key=lambda each: each.begin_ns):
        for row in rows:
            end_ns = row[-1].end_ns
            if end_ns is not None and end_ns <= each.begin_ns:
                row.append(each)
                break
        else:
            rows.append([each])
    return rows


def _keyed(groups: Sequence[RecordedGroup]) -> list[tuple[str, RecordedGroup]]:
    """Groups with unique keys: a group may be left and formed anew."""
    seen: dict[str, int] = {}
    keyed = []
    for group in groups:
        times = seen[group.key] = seen.get(group.key, 0) + 1
        keyed.append((f"{group.key} ({times})" if times > 1 else group.key, group))
    return keyed


def _tracks(worker: WorkerTrace, key: str, group: RecordedGroup, zero_ns: int) -> Iterator[Track]:
    name = group.name if group.backend == "rallypoint" else f"{group.name} ({group.backend})"
    collectives = [_slice(worker, key, group, call, zero_ns) for call in group.calls]
    if group.backend == "rallypoint":  # these calls were sequential; coarse times may not show it
        for before, after in pairwise(collectives):
            if before.end_ns is not None and after.begin_ns < before.end_ns:
                _move(after, before.end_ns)
    transfers = [_slice(worker, "", group, call, zero_ns) for call in group.transfers]
    for title, slices in ((name, collectives), (f"{name}: sends and receives", transfers)):
        for number, row in enumerate(lay_side_by_side(slices), 1):
            yield Track(
                rank=worker.rank,
                name=title if number == 1 else f"{title}, {number} at a time",
                slices=row,
            )


def _move(slice_: Slice, begin_ns: int) -> None:
    slice_.begin_ns = begin_ns
    if slice_.end_ns is not None:
        slice_.end_ns = max(slice_.end_ns, begin_ns + 1)


def _slice(
    worker: WorkerTrace, key: str, group: RecordedGroup, call: RecordedCall, zero_ns: int
) -> Slice:
    begin_ns = call.since_ns - zero_ns
    is_exact = group.backend != "rallypoint" or 0 < worker.exact_ns <= call.since_ns
    end_ns = None
    if call.state != "running":
        end_ns = max(begin_ns + 1, call.ended_ns - zero_ns)
    return Slice(
        rank=worker.rank,
        name=call.operation or "call",
        begin_ns=begin_ns,
        end_ns=end_ns,
        args=_args(group, call, is_exact=is_exact),
        joins=(key, call.number, call.operation) if key and call.peer is None else None,
        is_exact=is_exact,
    )


def _args(group: RecordedGroup, call: RecordedCall, *, is_exact: bool) -> Args:
    args: Args = {"number": call.number, "state": call.state}
    if call.count:
        args["items"] = call.count
    if call.dtype and call.count:
        args["dtype"] = call.dtype
        if size := _item_bytes(call.dtype):
            args["bytes"] = call.count * size
    if call.shape:
        args["shape"] = " x ".join(map(str, call.shape))
    if reduces(call.operation) and call.operator:
        args["operator"] = call.operator
    if root_argument(call.operation) and call.root >= 0:
        args["root"] = _name(group, call.root)
    if call.peer is not None:
        args["to" if call.operation == "send" else "from"] = _name(group, call.peer)
        args["tag"] = call.root
    if call.site:
        args["waits at"] = call.site
    if call.state != "running" and not call.ended_ns:
        args["end"] = "not known"
    if not is_exact:
        args["times"] = "within some milliseconds"
    return args


def _name(group: RecordedGroup, rank: int) -> str:
    if rank < 0:
        return "any rank"
    known = group.global_rank(rank)
    return f"rank {rank} of the group" if known is None else f"rank {known}"


def _item_bytes(dtype: str) -> int:
    """The size of an item; 0 if unknown."""
    if dtype == "bool":
        return 1
    bits = re.match(r"[a-z]+(\d+)", dtype)
    return int(bits[1]) // 8 if bits else 0


def _say_who_was_last(slices: Sequence[Slice]) -> None:
    """Note which rank was last; `slices` are those of one collective, in the order of entry."""
    if not all(each.is_exact for each in slices):
        return
    late_ns = slices[-1].begin_ns - slices[0].begin_ns
    text = f"rank {slices[-1].rank}, {late_ns / 1000:.1f} us after the first"
    for each in slices:
        each.args["entered last"] = text


def _begins(nodes: Sequence[NodeTrace], offsets: Sequence[Offset]) -> Iterator[int]:
    for node, offset in zip(nodes, offsets, strict=True):
        for worker in node.workers:
            for group in worker.groups:
                for call in (*group.calls, *group.transfers):
                    yield call.since_ns - offset.ns


def _clocks(
    nodes: Sequence[NodeTrace], groups: Mapping[int, Sequence[tuple[str, RecordedGroup]]]
) -> list[ClockOf]:
    if len({node.clock for node in nodes} - {""}) == 1 and all(node.clock for node in nodes):
        return [ClockOf(name=node.clock, wall_ns=node.wall_ns, collectives={}) for node in nodes]
    most = max(
        (sum(len(group.calls) for group in worker.groups) for n in nodes for worker in n.workers),
        default=0,
    )
    step = most // _MOST_FOR_CLOCKS + 1  # the same calls are chosen on all nodes
    return [
        ClockOf(name=node.clock, wall_ns=node.wall_ns, collectives=_intervals(node, groups, step))
        for node in nodes
    ]


def _intervals(
    node: NodeTrace, groups: Mapping[int, Sequence[tuple[str, RecordedGroup]]], step: int
) -> dict[tuple[str, int], Interval]:
    """When the node was in each collective that no rank leaves before all have entered."""
    found: dict[tuple[str, int], Interval] = {}
    for worker in node.workers:
        for key, group in groups[id(worker)]:
            for call in group.calls:
                if call.operation not in JOINT or not call.ended_ns or call.state != "done":
                    continue
                if call.number % step or not 0 < worker.exact_ns <= call.since_ns:
                    continue
                known = found.get((key, call.number))
                found[key, call.number] = Interval(
                    begin_ns=max(call.since_ns, known.begin_ns if known else 0),
                    end_ns=min(call.ended_ns, known.end_ns if known else call.ended_ns),
                )
    return found
