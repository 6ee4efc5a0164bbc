"""Replicas of one rank by itself; tests/system/test_elastic_shards.py has more of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

import rallypoint as dist
from rallypoint import elastic
from rallypoint.elastic.agreement import RankReport
from rallypoint.elastic.membership import membership


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_one_rank(alone: None) -> None:
    replicas = elastic.Replicas(shards=1)
    assert (replicas.shard, replicas.rank, replicas.size, replicas.is_idle) == (0, 0, 1, False)
    array = numpy.ones(3)
    for group in (replicas.shard_group, replicas.replicate_group, replicas.group):
        dist.all_reduce(array, group=group)
    assert array.tolist() == [1, 1, 1]
    state = elastic.State(step=0)

    @elastic.run
    def train(state: elastic.State) -> str:
        assert elastic.Sampler(10, 4).indices(state.step).size == 4
        with state.update():
            state.step += 1
        return "done"

    assert train(state) == "done"
    assert state.step == 1


def test_refusals(alone: None) -> None:
    with pytest.raises(dist.InvalidArgumentError, match="shards=0 must be positive"):
        elastic.Replicas(shards=0)
    with pytest.raises(dist.InvalidArgumentError, match="1 ranks cannot hold 2 shards"):
        elastic.Replicas(shards=2)


def test_after_a_refusal_it_can_be_made(alone: None) -> None:
    with pytest.raises(dist.InvalidArgumentError, match="1 ranks cannot hold 2 shards"):
        elastic.Replicas(shards=2)
    assert elastic.Replicas(shards=1).size == 1


@pytest.mark.parametrize("shards", [0, 1])
def test_who_has_an_old_state_or_half_of_one_is_no_source(alone: None, shards: int) -> None:
    if shards:
        elastic.Replicas(shards=shards)
    for committed, prepared in ((0, 1), (7, 7)):
        old = RankReport(is_member=False, committed=committed, prepared=prepared)
        with pytest.raises(elastic.StateLostError, match="had the state were lost"):
            membership().exchange(old)


def test_idle_ranks_take_no_samples(alone: None) -> None:
    with pytest.raises(dist.InvalidArgumentError, match="rank=-1 is not one of 2 ranks that train"):
        elastic.Sampler(10, 4).indices(0, rank=-1, world_size=2)


def test_one_is_enough(alone: None) -> None:
    elastic.Replicas(shards=1)
    with pytest.raises(dist.AlreadyInitializedError, match=r"has its elastic\.Replicas already"):
        elastic.Replicas(shards=1)


def test_a_default_group_comes_first() -> None:
    with pytest.raises(dist.NotInitializedError, match="call init_process_group first"):
        elastic.Replicas(shards=1)
