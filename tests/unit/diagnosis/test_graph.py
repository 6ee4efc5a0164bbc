from __future__ import annotations

from rallypoint.diagnosis.graph import Needs, Node, reduce_graph, smallest_cycle, waiting_for


def clauses(*each: set[Node]) -> tuple[frozenset[Node], ...]:
    return tuple(frozenset(one) for one in each)


def test_one_of_several_is_enough_and_all_are_needed() -> None:
    either: Needs = {1: clauses({2, 3}), 2: clauses({1})}
    assert reduce_graph(either).roots == (3,)
    assert not reduce_graph(either).stuck
    both: Needs = {1: clauses({2}, {3}), 2: clauses({1})}
    assert reduce_graph(both).roots == (3,)
    assert reduce_graph(both).stuck == {1, 2}


def test_what_follows_from_another_clause_does_not_count() -> None:
    needs: Needs = {1: clauses({2, 3}, {2})}
    assert set(reduce_graph(needs).roots) == {2}


def test_who_waits_for_the_stuck_is_stuck_and_not_in_the_circle() -> None:
    needs: Needs = {
        0: clauses({1}),
        1: clauses({2}),
        2: clauses({3}),
        3: clauses({1}),
        4: clauses({2, 9}),
    }
    reduction = reduce_graph(needs)
    assert reduction.stuck == {0, 1, 2, 3}
    assert smallest_cycle(needs, reduction.stuck) == (1, 2, 3)
    waiters: dict[Node, set[Node]] = {1: {0, 3}, 2: {1, 4}, 3: {2}, 9: {4}}
    assert waiting_for(waiters, [3]) == {0, 1, 2, 4}


def test_a_clause_that_can_be_met_is_no_part_of_a_circle() -> None:
    """1 waits for 2 or 9, and for 3: it is 3 that keeps it."""
    needs: Needs = {1: clauses({2, 9}, {3}), 2: clauses({1}), 3: clauses({1})}
    reduction = reduce_graph(needs)
    assert reduction.stuck == {1, 2, 3}
    assert smallest_cycle(needs, reduction.stuck) == (1, 3)


def test_no_circle() -> None:
    assert smallest_cycle({}, frozenset()) == ()
