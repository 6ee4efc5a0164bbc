"""What follows from workers' complaints."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from rallypoint.launch.agent.complaints import GRACE_S, Hang, Hangs, LostContacts, TimedOutCalls

# Which hangs are told: those in which somebody waits who has complained, and each of them once.


def explanation_of(
    *,
    culprit: int = 1,
    waiting: tuple[int, ...] = (0, 2),
    number: int = 5,
    for_s: float | None = 31.0,
    status: int = 3,
    **changes: object,
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "exit_status": status,
        "sentence": f"rank {culprit} never entered all_reduce #{number}.",
        "roots": [{"ranks": [culprit], "cause": "elsewhere", "waited_for_by": list(waiting)}],
        "edges": [
            {
                "ranks": list(waiting),
                "waits_for": [culprit],
                "group": "default group",
                "operation": "all_reduce",
                "number": number,
                "for_s": for_s,
            }
        ],
    }
    return told | changes


def complaining(*ranks: int) -> Hangs:
    hangs = Hangs(30.0)
    for rank in ranks:
        hangs.complains(rank)
    return hangs


def test_a_hang_is_told_once() -> None:
    hangs = complaining(0)
    hang = hangs.judge(explanation_of())
    assert hang is not None
    assert hang.text == "the job hangs: rank 1 never entered all_reduce #5."
    assert hang.past == "the job hung: rank 1 never entered all_reduce #5"
    assert hang.event == {
        "sentence": "rank 1 never entered all_reduce #5.",
        "is_explained": True,
        "cause": "elsewhere",
        "ranks": [1],
        "waiting": [0, 2],
    }
    assert hangs.judge(explanation_of(for_s=62.0)) is None
    assert hangs.judge(explanation_of(waiting=(0, 2, 3))) is None


@pytest.mark.parametrize("change", [{"culprit": 3}, {"number": 6}])
def test_it_is_told_again_for_another_root_or_call(change: dict[str, Any]) -> None:
    hangs = complaining(0)
    assert hangs.judge(explanation_of()) is not None
    assert hangs.judge(explanation_of(**change)) is not None


def test_it_is_told_again_once_its_cause_is_known() -> None:
    """It may have been inspected at a moment that showed too little."""
    hangs = complaining(0)
    hang = hangs.judge(explanation_of(status=4))
    assert hang is not None and not hang.is_explained
    assert hangs.judge(explanation_of(status=4)) is None
    hang = hangs.judge(explanation_of())
    assert hang is not None and hang.is_explained
    assert hangs.judge(explanation_of(status=4)) is None


def test_what_goes_on_may_hang_again() -> None:
    hangs = complaining(0, 2)
    assert not hangs.goes_on(2)  # nothing was told
    assert hangs.judge(explanation_of()) is not None
    assert not hangs.goes_on(7)
    assert not hangs.goes_on(1)  # the one at fault had waited for something else
    assert hangs.goes_on(0)
    assert not hangs.goes_on(2)
    assert hangs.judge(explanation_of()) is None  # nobody complains any more
    hangs.complains(2)
    assert hangs.judge(explanation_of()) is not None


def test_who_complains_must_wait_for_it() -> None:
    assert complaining(4).judge(explanation_of()) is None
    assert complaining().judge(explanation_of()) is None
    assert complaining(4, 2).judge(explanation_of()) is not None


@pytest.mark.parametrize(
    "seen",
    [
        explanation_of(status=0),
        explanation_of(roots=[], status=4),
        explanation_of(for_s=5.0),
        explanation_of(roots=[{"ranks": [], "cause": "network", "waited_for_by": []}]),
    ],
)
def test_what_is_no_hang(seen: dict[str, Any]) -> None:
    assert complaining(0, 1, 2).judge(seen) is None


def test_times_that_are_not_known() -> None:
    assert complaining(0).judge(explanation_of(for_s=None)) is not None
    # Who has called something else is waited for by nobody in particular.
    mismatch = {"ranks": [1], "cause": "different operations", "waited_for_by": [0, 2]}
    assert complaining(0).judge(explanation_of(roots=[mismatch], edges=[])) is not None


def test_a_hang_that_is_not_explained() -> None:
    network = {"ranks": [], "cause": "network", "waited_for_by": [0, 2]}
    hang = complaining(2).judge(explanation_of(status=4, roots=[network]))
    assert isinstance(hang, Hang)
    assert hang.rank == 0
    assert hang.text.startswith("the job may hang: ")
    assert hang.past.startswith("the job may have hung: ")


def stopped(
    for_s: float, cause: str = "stopped", waiting: tuple[int, ...] = (0, 2)
) -> dict[str, Any]:
    root = {"ranks": [1], "cause": cause, "waited_for_by": list(waiting)}
    edges = explanation_of(for_s=for_s)["edges"] if waiting else []
    return explanation_of(edges=edges, roots=[root])


def test_one_that_is_stopped_is_waited_for_a_tenth_of_the_time() -> None:
    hangs = complaining(1)  # its agent does, for it
    assert hangs.judge(stopped(2.0)) is None
    assert hangs.judge(stopped(3.0, waiting=())) is None
    assert hangs.judge(stopped(3.0, "elsewhere")) is None
    hang = hangs.judge(stopped(3.0))
    assert hang is not None
    assert hang.rank == 1


def test_one_that_was_stopped_goes_on() -> None:
    hangs = complaining(1)
    assert hangs.judge(stopped(3.0)) is not None
    assert not hangs.goes_on(0, was_stopped=True)
    assert hangs.goes_on(1, was_stopped=True)
    assert not hangs.goes_on(1, was_stopped=True)


def test_a_hang_of_another_cause_is_not_over_for_it() -> None:
    hangs = complaining(0, 1)
    assert hangs.judge(stopped(31.0, "elsewhere")) is not None
    assert not hangs.goes_on(1, was_stopped=True)
    assert hangs.goes_on(0)


# Who is at fault when calls time out.


@pytest.mark.parametrize(
    ("reports", "at_fault"),
    [
        ([(0, 2, ()), (1, 2, ())], [2]),
        ([(0, 1, ()), (1, 2, ())], [2]),  # 0 waited for 1, which waited for 2
        ([(0, 1, ()), (1, 1, ())], [2]),  # all were told of the first timeout
        ([(0, 2, ()), (1, 0, ()), (2, 1, ())], []),  # 2 was slow, and is there by now
        ([(0, 1, (0, 1))], [1]),  # in a call of two ranks: 2 had no part in it
        ([(0, 1, (0, 1)), (1, 0, (0, 1))], []),
        ([(0, 7, ())], [1, 2]),  # no such rank
    ],
)
def test_who_reports_nothing_is_at_fault(
    reports: list[tuple[int, int, tuple[int, ...]]], at_fault: list[int]
) -> None:
    calls = TimedOutCalls(3)
    assert calls.judge_at is None
    for rank, culprit, members in reports:
        calls.report(rank, culprit, members, 5.0 + rank / 10)
    assert calls.judge_at == 5.0 + GRACE_S
    assert calls.judge() == at_fault
    calls.report(1, 2, (), 9.0)
    assert calls.judge_at is None, "a round is judged once"


# Without whom ranks that cannot reach each other go on.


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
        most = max(Counter(each for pair in pairs for each in pair).values(), default=0)
        # What this way of covering is known to keep to, at worst (Chvatal 1979).
        worst = sum(1 / of for of in range(1, most + 1)) * least_cover(pairs, len(nodes))
        assert len(at_fault) <= worst, complaints


def least_cover(pairs: list[tuple[int, int]], nodes: int) -> int:
    for size in range(nodes + 1):
        for some in itertools.combinations(range(nodes), size):
            if all(a in some or b in some for a, b in pairs):
                return size
    raise AssertionError
