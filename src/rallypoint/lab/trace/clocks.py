"""Aligns the clocks of a job's nodes, using that no rank leaves a collective before all have
entered.

For a collective of two nodes A and B, with B's clock ahead by an unknown offset:

    A's end >= B's begin, and B's end >= A's begin      so the offset lies between two bounds
    both end when the last has entered                  so the ends differ by the offset, or nearly

The offset is the median of the differences, kept within the bounds of all collectives together.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rallypoint.base.collective import JOINT_OPERATIONS

# In these collectives no rank has all it needs before all ranks have begun: our names, and those of
# torch's backends.
JOINT = JOINT_OPERATIONS | {
    "allreduce",
    "allgather",
    "_allgather_base",
    "_reduce_scatter_base",
    "alltoall",
    "all_gather_object",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """When one node was in a collective, by its own clock.

    Attributes:
        begin_ns: when its last rank entered.
        end_ns: when its first rank left.
    """

    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """What to subtract from a node's times.

    Attributes:
        ns: how far its clock is ahead of the first node's.
        how: "same clock", "collectives", "time of day" or "unknown".
        collectives: the number of collectives that this is based on.
        spread_ns: half of the differences lie within this distance of the median.
        bounds_ns: the offset certainly lies between these, unless a clock has drifted.
    """

    ns: int
    how: str
    collectives: int = 0
    spread_ns: int = 0
    bounds_ns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOf:
    """What is known of a node's clock.

    Attributes:
        name: equal for nodes that share a clock; empty if unknown.
        wall_ns: how far the machine's time of day is ahead of it; None if unknown.
        collectives: those whose identity distinguishes them from all others.
    """

    name: str
    wall_ns: int | None
    collectives: Mapping[tuple[str, int], Interval]


_SAME = Offset(ns=0, how="same clock", bounds_ns=(0, 0))


def align(clocks: Sequence[ClockOf]) -> list[Offset]:
    """The offset of each node from the first one, through the most reliable links between them."""
    offsets: dict[int, Offset] = {}
    best = dict.fromkeys(range(min(1, len(clocks))), (_SAME, _SAME))  # offset and link
    while len(offsets) < len(clocks):
        newest = max(best, key=lambda number: (_rank(best[number][1]), -number))
        offsets[newest] = _chain(*best.pop(newest))
        for number, clock in enumerate(clocks):
            if number in offsets:
                continue
            link = _between(clocks[newest], clock)
            if number not in best or _rank(link) > _rank(best[number][1]):
                best[number] = (offsets[newest], link)
    return [offsets[number] for number in range(len(clocks))]


def _chain(base: Offset, link: Offset) -> Offset:
    if link.how == _SAME.how:
        return base
    bounds = None
    if base.bounds_ns is not None and link.bounds_ns is not None:
        bounds = (base.bounds_ns[0] + link.bounds_ns[0], base.bounds_ns[1] + link.bounds_ns[1])
    return replace(link, ns=base.ns + link.ns, bounds_ns=bounds)


def _rank(link: Offset) -> tuple[int, int]:
    order = ("unknown", "time of day", "collectives", "same clock")
    return order.index(link.how), link.collectives


def _between(one: ClockOf, other: ClockOf) -> Offset:
    """How far the other clock is ahead of the one."""
    if one.name and one.name == other.name:
        return _SAME
    pairs = [
        (one.collectives[call], other.collectives[call])
        for call in one.collectives.keys() & other.collectives.keys()
    ]
    if pairs:
        return _by_collectives(pairs)
    if one.wall_ns is not None and other.wall_ns is not None:
        return Offset(ns=one.wall_ns - other.wall_ns, how="time of day")
    return Offset(ns=0, how="unknown")


def _by_collectives(pairs: Sequence[tuple[Interval, Interval]]) -> Offset:
    low = max(other.begin_ns - one.end_ns for one, other in pairs)
    high = min(other.end_ns - one.begin_ns for one, other in pairs)
    differences = [other.end_ns - one.end_ns for one, other in pairs]
    median = statistics.median_low(differences)
    spread = statistics.median_low(abs(each - median) for each in differences)
    is_possible = low <= high
    return Offset(
        ns=min(max(median, low), high) if is_possible else median,
        how="collectives",
        collectives=len(pairs),
        spread_ns=spread,
        bounds_ns=(low, high) if is_possible else None,
    )
