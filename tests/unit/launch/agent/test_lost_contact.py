"""Without whom ranks that cannot reach each other go on."""

from __future__ import annotations

import itertools
import random

import pytest

from rallypoint.launch.agent.call_timeouts import GRACE_S
from rallypoint.launch.agent.lost_contact import LostContacts


def judged(*complaints: tuple[int, int], per_node: int = 1, had_formed: bool = False) -> list[int]:
    contacts = LostContacts(16)
    for rank, culprit in complaints:
        contacts.report(rank, culprit, 5.0, had_formed=had_formed)
    return contacts.judge(lambda rank: rank // per_node)


@pytest.mark.parametrize(
    ("complaints", "at_fault"),
    [
        ([(0, 1), (1, 0)], [1]),  # one of the two, and not where the store is
        ([(0, 1), (1, 0), (2, 1)], [1]),
        ([(1, 0), (2, 0)], [0]),
        ([(0, 1), (1, 0), (2, 3), (3, 2)], [1, 3]),
        ([(0, -1), (1, -1)], []),  # nobody knows whom
        ([(1, 1)], []),
        ([(0, 16), (1 << 40, 2)], []),  # no such ranks
    ],
)
def test_who_is_at_fault(complaints: list[tuple[int, int]], at_fault: list[int]) -> None:
    assert judged(*complaints) == at_fault
    assert judged(*reversed(complaints)) == at_fault


FOUR = range(4)


@pytest.mark.parametrize(
    ("complaints", "at_fault"),
    [
        # Each names the first that is missing of the other node.
        ([*((rank, 4) for rank in FOUR), *((rank + 4, 0) for rank in FOUR)], [4, 5, 6, 7]),
        ([(rank + 4, 0) for rank in FOUR], [4, 5, 6, 7]),  # the store is out of reach
        ([*((rank, 9) for rank in range(8)), (9, 0)], [9]),  # the path to one rank is blocked
        ([(5, 6), (6, 5)], [6]),  # on one node
        ([(1, 6), (6, 1), (5, 6)], [6]),
    ],
)
def test_of_nodes_with_four_ranks(complaints: list[tuple[int, int]], at_fault: list[int]) -> None:
    assert judged(*complaints, per_node=4) == at_fault


def test_nobody_is_if_all_had_been_connected() -> None:
    assert judged((0, 1), (1, 0), had_formed=True) == []


def test_a_round_is_judged_once() -> None:
    contacts = LostContacts(3)
    assert contacts.judge_at is None
    contacts.report(0, 1, 5.0, had_formed=False)
    contacts.report(1, 0, 5.5, had_formed=False)
    assert contacts.judge_at == 5.0 + GRACE_S
    assert contacts.judge(int) == [1]
    contacts.report(2, 0, 7.0, had_formed=False)
    assert contacts.judge_at is None


def test_without_them_nobody_complains_and_they_are_few(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        nodes = range(chance.randint(2, 8))
        pairs = [pair for pair in itertools.combinations(nodes, 2) if chance.random() < 0.2]
        complaints = [chance.choice((pair, pair[::-1])) for pair in pairs]
        at_fault = set(judged(*complaints))
        assert all(at_fault.intersection(pair) for pair in pairs)
        assert len(at_fault) <= least_cover(pairs, len(nodes)) + 1, complaints


def least_cover(pairs: list[tuple[int, int]], nodes: int) -> int:
    for size in range(nodes + 1):
        for some in itertools.combinations(range(nodes), size):
            if all(a in some or b in some for a, b in pairs):
                return size
    raise AssertionError
