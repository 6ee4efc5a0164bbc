"""Clocks of made-up nodes, whose offsets are known, are found from their collectives."""

from __future__ import annotations

import random

import pytest

from rallypoint.lab.trace.clocks import ClockOf, Interval, align


def clock(
    name: str, collectives: dict[tuple[str, int], Interval], wall_ns: int | None = None
) -> ClockOf:
    return ClockOf(name=name, wall_ns=wall_ns, collectives=collectives)


@pytest.mark.parametrize("repeat", range(50))
def test_random_nodes(repeat: int, seed: int) -> None:
    """Nodes enter at any time and leave within 20 us of the last entry, some much later."""
    chance = random.Random(f"{seed}/{repeat}")
    nodes = chance.randrange(2, 6)
    ahead = [0] + [chance.randrange(-(10**12), 10**12) for _ in range(nodes - 1)]
    # Each call is of two nodes or more; a chain connects all.
    calls: list[dict[tuple[str, int], Interval]] = [{} for _ in range(nodes)]
    for number in range(60 * nodes):
        pair = number % (nodes - 1)
        members = {pair, pair + 1} | {i for i in range(nodes) if chance.random() < 0.2}
        entered = {i: number * 10**6 + chance.randrange(500_000) for i in members}
        last = max(entered.values())
        for i, at in entered.items():
            left = last + chance.randrange(20_000) + (chance.random() < 0.1) * 300_000
            calls[i]["g", number] = Interval(begin_ns=at + ahead[i], end_ns=left + ahead[i])
    offsets = align([clock(f"{i}", each) for i, each in enumerate(calls)])
    for i, offset in enumerate(offsets):
        assert abs(offset.ns - ahead[i]) < 20_000 * nodes
        assert i == 0 or offset.how == "collectives"
        assert offset.bounds_ns is not None
        assert offset.bounds_ns[0] <= ahead[i] <= offset.bounds_ns[1]


def test_one_pair_is_within_its_bounds() -> None:
    one = {("g", 0): Interval(begin_ns=0, end_ns=100)}
    other = {("g", 0): Interval(begin_ns=1000, end_ns=5000)}
    first, second = align([clock("a", one), clock("b", other)])
    assert (first.ns, first.how) == (0, "same clock")
    assert second.bounds_ns == (900, 5000)
    assert second.ns == 4900


def test_without_common_collectives_the_time_of_day_serves() -> None:
    offsets = align([clock("a", {}, wall_ns=50), clock("b", {}, wall_ns=20), clock("c", {})])
    assert [(each.ns, each.how) for each in offsets] == [
        (0, "same clock"),
        (30, "time of day"),
        (0, "unknown"),
    ]


def test_nodes_that_share_a_clock_need_no_alignment() -> None:
    one = {("g", 0): Interval(begin_ns=0, end_ns=100)}
    late = {("g", 0): Interval(begin_ns=50, end_ns=700)}
    offsets = align([clock("a", one), clock("a", late)])
    assert [(each.ns, each.how) for each in offsets] == [(0, "same clock")] * 2
    assert align([]) == []
