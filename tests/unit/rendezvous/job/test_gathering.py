"""When a rendezvous is complete, and which ranks its members get."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.rendezvous.job.gathering import Gathering, Limits, assign, natural
from rallypoint.rendezvous.job.round import Member

LIMITS = Limits(min_nodes=2, max_nodes=4, join_timeout_s=60.0, last_call_s=3.0)


def member(name: str, wish: int | None = None, rank: int = -1) -> Member:
    return Member(key=name, host=name, local_world_size=1, wish=wish, node_rank=rank)


def gathering(*names: str, limits: Limits = LIMITS) -> Gathering:
    found = Gathering(limits)
    found.open(0.0)
    for name in names:
        assert found.join(member(name), 0.0) == ""
    return found


def test_complete_at_once_with_the_most() -> None:
    assert gathering("a", "b", "c", "d").is_complete(0.0)


def test_a_last_call_after_the_fewest() -> None:
    found = gathering("a")
    assert not found.is_complete(50.0)
    found.join(member("b"), 10.0)
    assert found.wake_at == 13.0
    assert not found.is_complete(12.9)
    found.join(member("c"), 12.0)  # it is not prolonged
    assert found.is_complete(13.0)


def test_a_last_call_ends_when_there_are_too_few_again() -> None:
    found = gathering("a", "b")
    found.leave("a")
    assert not found.is_complete(10.0)
    found.join(member("c"), 20.0)
    assert not found.is_complete(22.0)
    assert found.is_complete(23.0)


def test_keys_count_where_names_are_the_same() -> None:
    members = [member(key).__replace__(host="box") for key in ("z", "a", "m")]
    assert [each.key for each in assign(members, {})] == ["a", "m", "z"]


def test_no_last_call_for_those_who_stay() -> None:
    found = gathering("a", "b", "c")
    found.leave("c")
    found.open(100.0)
    assert found.is_complete(100.0)


def test_the_time_to_wait_is_over_only_below_the_fewest() -> None:
    found = gathering("a")
    assert not found.is_over(59.0)
    assert found.is_over(60.0)
    found.join(member("b"), 59.5)
    assert not found.is_over(61.0)


def test_what_is_told_while_waiting() -> None:
    assert gathering("b2", "b10").text() == "2 of at least 2 nodes joined (b2, b10); missing 0"
    exact = Limits(min_nodes=3, max_nodes=3)
    assert gathering("a", limits=exact).text() == "1 of 3 nodes joined (a); missing 2"
    fixed = Gathering(Limits(min_nodes=3, max_nodes=3, is_fixed=True))
    fixed.join(member("a", wish=1), 0.0)
    assert fixed.text() == "1/3 nodes joined; missing node-rank 0, 2"


def test_a_wish_that_is_taken_or_too_large_is_refused() -> None:
    found = gathering("a")
    assert found.join(member("b", wish=1), 0.0) == ""
    refusal = found.join(member("c", wish=1), 0.0)
    assert "node rank 1 is taken by host 'b'; this is 'c'" in refusal
    assert "--node-rank 4 is too large for 4 nodes" in found.join(member("d", wish=4), 0.0)
    assert set(found.here) == {"a", "b"}
    found.leave("b")
    assert found.join(member("c", wish=1), 0.0) == ""


def test_nodes_that_are_known_from_the_start_are_not_replaced() -> None:
    fixed = Gathering(Limits(min_nodes=2, max_nodes=2, is_fixed=True))
    for wish, name in enumerate(("a", "b")):
        assert fixed.join(member(name, wish=wish), 0.0) == ""
    assert ranks(fixed.form(())) == ["a", "b"]
    assert "node rank 1 is taken by host 'b'" in fixed.join(member("c", wish=1), 0.0)
    fixed.leave("b")
    assert "the job has already begun" in fixed.join(member("c", wish=1), 0.0)


def ranks(members: tuple[Member, ...]) -> list[str]:
    assert [each.node_rank for each in members] == list(range(len(members)))
    return [each.key for each in members]


def test_ranks_follow_wishes_then_habit_then_names() -> None:
    new = [member("node66"), member("node7"), member("node8", wish=0)]
    assert ranks(assign(new, {})) == ["node8", "node7", "node66"]
    before = {"node8": 0, "node7": 1, "node66": 2}
    # node7 is gone: node66 keeps its order, and a newcomer comes last whatever its name.
    left = [member("node1"), member("node66"), member("node8", wish=0)]
    assert ranks(assign(left, before)) == ["node8", "node1", "node66"]
    assert ranks(assign([member("node66"), member("node8")], before)) == ["node8", "node66"]


def test_those_of_the_round_before_go_first_when_there_are_too_many() -> None:
    found = gathering("e", "b", "c", "d")
    found.here["a"] = member("a")
    formed = found.form([member("b", rank=0), member("c", rank=1), member("a", rank=2)])
    assert ranks(formed) == ["b", "c", "a", "e"]  # d came after e


KEYS = st.lists(st.integers(0, 30), unique=True, min_size=1, max_size=10)


@given(keys=KEYS, before=KEYS, wishes=st.lists(st.none() | st.integers(0, 9), min_size=10))
def test_ranks_are_a_permutation_that_honours_wishes_and_habits(
    keys: list[int], before: list[int], wishes: list[int | None]
) -> None:
    taken: set[int] = set()
    members = []
    for key, wish in zip(keys, wishes, strict=False):
        own = None if wish is None or wish in taken else wish
        taken |= set() if own is None else {own}
        members.append(member(f"n{key}", wish=own))
    old = {f"n{key}": rank for rank, key in enumerate(before)}
    formed = assign(members, old)
    assert sorted(ranks(formed)) == sorted(each.key for each in members)
    count = len(members)
    for each in formed:
        if each.wish is not None and each.wish < count:
            assert each.node_rank == each.wish
    wished = {each.wish for each in members if each.wish is not None and each.wish < count}
    for each in formed:
        rank = old.get(each.key, count)
        has_wish = each.wish is not None and each.wish < count
        if not has_wish and rank < count and rank not in wished:
            assert each.node_rank == rank


@given(numbers=st.lists(st.integers(0, 10**6), min_size=2), stem=st.sampled_from(["", "n", "r1-n"]))
def test_numbers_in_names_count_as_numbers(numbers: list[int], stem: str) -> None:
    names = [f"{stem}{number}x" for number in numbers]
    assert sorted(names, key=natural) == [f"{stem}{number}x" for number in sorted(numbers)]


@pytest.mark.parametrize("names", [["node7", "node66"], ["a", "a1", "a1b", "a2"], ["2x", "10x"]])
def test_natural_order_by_example(names: list[str]) -> None:
    shuffled = names[::-1]
    assert sorted(shuffled, key=natural) == names
