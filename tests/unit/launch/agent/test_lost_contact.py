"""Without whom ranks that cannot reach each other go on; the least number, by trying all."""

from __future__ import annotations

import itertools
import random

import pytest

from rallypoint.launch.agent.lost_contact import LostContacts
from rallypoint.launch.agent.timeouts import GRACE_S


def judged(*complaints: tuple[int, int], had_formed: bool = False) -> list[int]:
    contacts = LostContacts()
    for rank, culprit in complaints:
        contacts.report(rank, culprit, 5.0, had_formed=had_formed)
    return contacts.judge()


@pytest.mark.parametrize(
    ("complaints", "at_fault"),
    [
        ([(0, 1), (1, 0)], [1]),  # one of the two, and not where the store is
        ([(0, 1), (1, 0), (2, 1)], [1]),
        ([(1, 0), (2, 0)], [0]),
        ([(0, 1), (1, 0), (2, 3), (3, 2)], [1, 3]),
        ([(0, -1), (1, -1)], []),  # nobody knows whom
        ([(1, 1)], []),
    ],
)
def test_who_is_at_fault(complaints: list[tuple[int, int]], at_fault: list[int]) -> None:
    assert judged(*complaints) == at_fault
    assert judged(*reversed(complaints)) == at_fault


def test_nobody_is_if_all_had_been_connected() -> None:
    assert judged((0, 1), (1, 0), had_formed=True) == []


def test_a_round_is_judged_once() -> None:
    contacts = LostContacts()
    assert contacts.judge_at is None
    contacts.report(0, 1, 5.0, had_formed=False)
    contacts.report(1, 0, 5.5, had_formed=False)
    assert contacts.judge_at == 5.0 + GRACE_S
    assert contacts.judge() == [1]
    contacts.report(2, 0, 7.0, had_formed=False)
    assert contacts.judge_at is None


def test_about_as_few_go_as_possible() -> None:
    """Of two hosts that are cut off from each other; each rank has met one that it cannot reach."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(200):
        size = chance.randint(1, 5)
        here, there = range(size), range(size, 2 * size)
        complaints = [(rank, chance.choice(there)) for rank in here]
        complaints += [(rank, chance.choice(here)) for rank in there]
        at_fault = set(judged(*complaints))
        assert all(rank in at_fault or culprit in at_fault for rank, culprit in complaints)
        least = least_cover(complaints, 2 * size)
        assert least <= len(at_fault) <= least + 1, complaints


def least_cover(pairs: list[tuple[int, int]], ranks: int) -> int:
    for size in range(ranks + 1):
        for some in itertools.combinations(range(ranks), size):
            if all(a in some or b in some for a, b in pairs):
                return size
    raise AssertionError
