"""Who holds which shard: every replica is whole, and who replaces a rank takes its place."""

from __future__ import annotations

import random

import pytest

from rallypoint.elastic.agreement import NO_SHARD, Holding, arrange

NEW = Holding(NO_SHARD, has_state=False)


def has(shard: int) -> Holding:
    return Holding(shard, has_state=True)


def had(shard: int) -> Holding:
    """Of an idle rank, or one that has not got the state yet."""
    return Holding(shard, has_state=False)


def test_the_start() -> None:
    told = arrange([NEW] * 5, 2)
    assert told.shards == (0, 1, 0, 1, 0)
    assert told.replicas == ((0, 1), (2, 3))
    assert told.lost == ()
    assert arrange([NEW] * 2, 3).replicas == ()


def test_the_rest_of_a_replica_is_idle() -> None:
    assert arrange([has(0), has(0), has(1)], 2).replicas == ((0, 2),)


def test_a_newcomer_makes_it_whole_again() -> None:
    told = arrange([has(0), had(0), has(1), NEW], 2)
    assert (told.shards, told.replicas) == ((0, 0, 1, 1), ((0, 2), (1, 3)))


def test_who_has_the_state_comes_first() -> None:
    told = arrange([had(0), has(0), has(1)], 2)
    assert (told.replicas, told.lost) == (((1, 2),), ())


def test_a_shard_that_nobody_has_is_lost() -> None:
    assert arrange([has(0), has(0), NEW], 2).lost == (1,)
    assert arrange([has(0), had(1)], 2).lost == (1,)


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_any_losses(shards: int, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        number = chance.randrange(1, 5)
        start = arrange([NEW] * (number * shards), shards)
        lost = {rank for rank in range(number * shards) if chance.random() < 0.3}
        left = [rank for rank in range(number * shards) if rank not in lost]
        holdings = [has(start.shards[rank]) for rank in left]
        present = {each.shard for each in holdings}
        closed = arrange(holdings, shards)
        if holdings:
            assert set(closed.lost) == set(range(shards)) - present
        assert closed.shards == tuple(each.shard for each in holdings)
        fewest = min(closed.shards.count(shard) for shard in range(shards))
        assert len(closed.replicas) == fewest
        trains = [rank for replica in closed.replicas for rank in replica]
        assert len(set(trains)) == len(trains)
        for replica in closed.replicas:
            assert [closed.shards[rank] for rank in replica] == list(range(shards))
        # Newcomers with the numbers of the lost: as at the start.
        refilled = arrange(
            [NEW if rank in lost else has(start.shards[rank]) for rank in range(number * shards)],
            shards,
        )
        if all(start.shards[rank] in present for rank in lost):
            assert refilled.replicas == start.replicas
            assert refilled.shards == start.shards
