"""Thousands of random jobs that stand still: the same ranks are named as by trying everything."""

from __future__ import annotations

import random

import pytest

from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.explanation import Cause, Verdict
from rallypoint.diagnosis.facts import Facts, WorkerEnd, WorkerFacts
from rallypoint.diagnosis.graph import Node, reduce_graph
from rallypoint.diagnosis.job_state import job_state
from rallypoint.diagnosis.waits import find_waits, needs_of
from tests.unit.diagnosis.jobs import NOW_S, job, looked, ns, process, sleeping, stack, worker
from tests.unit.diagnosis.toy_ranks import Begun, Toy, broken, healthy, truth

_OF_SO_MANY = pytest.mark.parametrize("jobs", [3_000, pytest.param(10_000, marks=pytest.mark.long)])
_TORCH = "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"


@_OF_SO_MANY
def test_who_must_move(jobs: int, seed: int) -> None:
    seen = {"roots": 0, "deadlocks": 0, "mismatches": 0, "choices": 0}
    for number in range(jobs):
        draw = random.Random(f"{seed}/{number}")
        toy = broken(draw)
        toy.run(draw)
        facts = facts_of(toy, draw)
        expected = truth(toy)
        needs = needs_of(find_waits(job_state(facts, facts)))
        reduction = reduce_graph(needs)
        place = f"job {number}: {toy}"
        assert {as_toy(node) for node in reduction.roots} == expected.roots, place
        assert reduction.stuck == expected.deadlocked, place
        found = looked(facts)
        hangs = bool(expected.roots or expected.deadlocked or toy.frozen)
        assert found.exit_status == (3 if hangs else 0), (place, found.sentence)
        assert len(found.sentence) <= 240, found.sentence
        circles = expected.circles()
        assert bool(found.knot) == bool(circles), place
        if circles:
            assert min(map(len, circles)) == len(found.knot), place
            assert found.knot in circles, place
        named = {
            rank
            for root in found.roots
            if root.cause not in (Cause.DEADLOCK, Cause.MISMATCH)
            for rank in root.ranks
        }
        ranks = {root for root in expected.roots if isinstance(root, int)}
        assert named == ranks | toy.frozen, (place, found.sentence)
        seen["roots"] += bool(ranks)
        seen["deadlocks"] += bool(circles)
        seen["mismatches"] += len(ranks) < len(expected.roots)
        seen["choices"] += any(len(c) > 1 for each in needs.values() for c in each)
    assert min(seen.values()) > jobs // 200, seen  # each of these has been tried


@_OF_SO_MANY
def test_the_healthy_are_left_alone(jobs: int, seed: int) -> None:
    """Asked at any time, whether they move between the looks or wait for a moment."""
    waited = 0
    for number in range(jobs // 5):
        draw = random.Random(f"{seed}/{number}")
        toy = healthy(draw)
        toy.run(draw, steps=draw.randint(0, 20))
        before = program_counters(toy)
        first = facts_of(toy, random.Random(number))
        assert not reduce_graph(needs_of(find_waits(job_state(first, first)))).stuck, toy
        brief = facts_of(toy, random.Random(number), for_s=1.0)
        assert looked(brief).kind is Verdict.NO_HANG, toy
        waited += " for " in looked(brief).sentence
        toy.run(draw, steps=draw.randint(1, 4))
        if program_counters(toy) != before:  # not only the end of a call in the background
            second = facts_of(toy, random.Random(number))
            found = explanation_of(first, second)
            assert found.kind is Verdict.NO_HANG, (toy, found.sentence)
        toy.run(draw)
        at_rest = facts_of(toy, draw)
        assert looked(at_rest).kind is Verdict.NO_HANG, toy
    assert waited > jobs // 50


def program_counters(toy: Toy) -> list[tuple[int, bool]]:
    """How many calls each rank has made, and whether it waits for the last one."""
    return [(place, toy.current(rank) is None) for rank, place in enumerate(toy.places)]


def as_toy(node: Node) -> object:
    """A node of the graph as the toy calls it."""
    return node if isinstance(node, int) else (int(node[1]), int(node[2]))


def facts_of(toy: Toy, draw: random.Random, for_s: float = 12.0) -> Facts:
    return job(*(_worker(toy, rank, draw, for_s) for rank in range(len(toy.scripts))))


def _worker(toy: Toy, rank: int, draw: random.Random, for_s: float) -> WorkerFacts:
    groups = tuple(
        _group(toy, rank, key, for_s) for key, members in enumerate(toy.groups) if rank in members
    )
    state, waits = toy.state(rank), toy.current(rank)
    if state == "exit":
        return WorkerFacts(
            rank=rank, local_rank=rank, process=None, end=WorkerEnd(code=0), groups=groups
        )
    if state == "frozen":
        return worker(rank, *groups, at=process(rank, state="T"))
    if waits is None:
        return sleeping(rank, *groups)
    alone = sum(not each.is_done for each in toy.begun[rank]) == 1
    if alone and draw.random() < 0.3:  # its record is all that is known
        return worker(rank, *groups)
    in_call = stack(f"{_TORCH}:9 {waits.op.kind}", "/home/u/train.py:40")
    return worker(rank, *groups, stacks=[in_call])


def _group(toy: Toy, rank: int, key: int, for_s: float) -> RecordedGroup:
    members = toy.groups[key]
    mine = [each for each in toy.begun[rank] if each.op.group == key]
    return RecordedGroup(
        name=f"g{key}",
        key=str(key),
        members=",".join(map(str, members)),
        has_left=False,
        queued=0,
        calls=tuple(_call(toy, each, members, for_s) for each in mine if each.op.is_collective),
        transfers=tuple(
            _call(toy, each, members, for_s)
            for each in mine
            if not each.op.is_collective and not each.is_done
        ),
        transfers_begun=sum(not each.op.is_collective for each in mine),
    )


def _call(toy: Toy, each: Begun, members: tuple[int, ...], for_s: float) -> RecordedCall:
    op = each.op
    peer = None if op.is_collective else -1 if op.peer < 0 else members.index(op.peer)
    began_s = NOW_S - for_s - 0.01 * (toy.clock - each.at)
    return RecordedCall(
        number=each.number,
        operation=op.kind,
        state="done" if each.is_done else "running",
        since_ns=ns(began_s),
        dtype="float32",
        operator="SUM",
        root=op.tag if peer is not None else members.index(op.root) if op.root >= 0 else 0,
        count=op.count,
        peer=peer,
    )
