"""All ranks have the same history, whenever ranks are lost: every order of events is tried."""

import itertools
import os
from collections.abc import Sequence

import pytest
from tests.unit.elastic.model import Model, Told, settled

from rallypoint.elastic.agreement import RankReport, Settlement, settle

IS_LONG = os.environ.get("RALLYPOINT_TEST_ORDERS") == "all"

NEW = RankReport(False, 0, 0)


def member(committed: int, prepared: int, prepared_in: int = 3) -> RankReport:
    return RankReport(True, committed, prepared, prepared_in=prepared_in)


def test_the_first_start_takes_rank_0s_state() -> None:
    assert settle([NEW, NEW, NEW]) == Settlement(0, (0,), (1, 2))


def test_a_newcomer_has_no_say() -> None:
    told = settle([member(7, 8), NEW, member(7, 8)])
    assert told == Settlement(8, (0, 2), (1,))


def test_newcomers_keep_copies_as_the_others_do() -> None:
    assert settle([NEW, RankReport(True, 3, 3, True)]).saves
    assert not settle([NEW, member(3, 3)]).saves


@pytest.mark.parametrize(
    ("reports", "committed"),
    [
        ([member(7, 7), member(6, 7)], 7),  # one has committed: the other does, too
        ([member(6, 7), member(6, 7)], 7),  # who is lost may have committed it
        ([member(6, 7), member(6, 6)], 6),  # nobody can have
        ([member(6, 6)], 6),
        ([member(6, 7, 4), member(6, 7, 3)], 6),  # nobody can have, and it is not the same one
        ([member(7, 7, 3), member(6, 7, 3), member(7, 7, -1)], 7),
    ],
)
def test_rules(reports: list[RankReport], committed: int) -> None:
    for order in itertools.permutations(reports):
        assert settle(order).committed == committed


@pytest.mark.parametrize(
    ("ranks", "kills", "joins", "has_spares", "states"),
    [
        (3, 2, 0, False, 10_000),
        (2, 2, 0, True, 8_000),
        (3, 1, 0, True, 3_000),
        (2, 1, 1, False, 8_000),
        (2, 0, 2, False, 7_000),
    ],
)
def test_every_order(ranks: int, kills: int, joins: int, has_spares: bool, states: int) -> None:
    model = Model(shards=1, steps=2, has_spares=has_spares)
    assert model.explore(ranks, kills=kills, joins=joins) > states
    assert model.ways == {"join", "due"} if joins else "due" in model.ways


def test_a_loss_in_the_third_step() -> None:
    model = Model(shards=1, steps=3, has_spares=True)
    assert model.explore(3, kills=1, joins=0) > 4_000


def test_the_model_finds_a_wrong_rule() -> None:
    """Beginning again whatever no survivor has committed loses what a lost rank has told others."""

    def wrong(told: Sequence[Told]) -> Settlement:
        right = settled(told)
        least = min(told[rank].report.committed for rank in right.sources)
        return Settlement(least, right.sources, right.newcomers)

    with pytest.raises(AssertionError):
        Model(shards=1, steps=2, has_spares=True, rule=wrong).explore(3, kills=1, joins=0)


# With shards.


@pytest.mark.parametrize(
    ("ranks", "kills", "joins", "has_spares", "ways"),
    [
        (4, 1, 0, True, {"idle", "due", "end"}),  # who takes a lost rank's number has its shard
        (4, 1, 0, False, {"idle", "due", "end"}),
        (3, 1, 0, True, {"idle", "lost", "due", "end"}),
    ],
)
def test_every_order_with_two_shards(
    ranks: int, kills: int, joins: int, has_spares: bool, ways: set[str]
) -> None:
    model = Model(shards=2, steps=1, has_spares=has_spares)
    model.explore(ranks, kills=kills, joins=joins)
    assert model.ways - {"join"} == ways


@pytest.mark.skipif(not IS_LONG, reason="only in make check-long: minutes")
@pytest.mark.parametrize(("kills", "joins"), [(1, 1), (2, 0)])
def test_every_order_with_idle_ranks(kills: int, joins: int) -> None:
    model = Model(shards=2, steps=1, has_spares=False)
    print(model.explore(4, kills=kills, joins=joins), model.ways)


@pytest.mark.parametrize(("kills", "joins"), [(1, 1), (2, 0)])
def test_the_model_finds_a_rule_that_does_not_know_of_rounds(kills: int, joins: int) -> None:
    """An idle rank that settles late has prepared an update of other gradients."""

    def wrong(told: Sequence[Told]) -> Settlement:
        return settle([each.report._replace(prepared_in=0) for each in told])

    with pytest.raises(AssertionError):
        Model(shards=2, steps=1, has_spares=False, rule=wrong).explore(4, kills=kills, joins=joins)
