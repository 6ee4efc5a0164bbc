"""The choice of an algorithm: deterministic, reasoned, and open to an override."""

from __future__ import annotations

import math

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.schedule.catalogue import ALGORITHMS, build
from rallypoint.schedule.choose import check_override, choose, largest_of_class
from rallypoint.schedule.cost.links import Level, LinkModel, Links, read_model
from rallypoint.schedule.cost.simulation import Simulation
from rallypoint.schedule.program import Collective, widen


def test_every_choice_exists_and_says_why() -> None:
    for collective, algorithms in ALGORITHMS.items():
        for ranks in (1, 2, 3, 16, 17, 1000):
            for exponent in range(0, 31, 3):
                choice = choose(collective, nbytes=1 << exponent, ranks=ranks)
                assert choice.algorithm in algorithms
                assert choice.reason


def test_small_messages_take_one_step_and_large_ones_share_the_work() -> None:
    def chosen(nbytes: int, ranks: int) -> str:
        return choose(Collective.ALL_REDUCE, nbytes=nbytes, ranks=ranks).algorithm

    assert chosen(8, 8) == "direct_one_shot"
    assert chosen(1 << 20, 8) == "direct_two_shot"
    assert chosen(1 << 20, 64) == "ring"
    assert chosen(1 << 19, 2) == chosen(1 << 16, 4) == "direct_one_shot"
    assert chosen(1 << 17, 4) == "direct_two_shot"
    assert chosen(1 << 26, 2) == "direct_two_phase"


def test_ranks_with_a_core_each_wait_more_often_for_fewer_bytes() -> None:
    def chosen(nbytes: int, ranks: int, what: Collective = Collective.ALL_REDUCE) -> str:
        usual = choose(what, nbytes=nbytes, ranks=ranks).algorithm
        found = choose(what, nbytes=nbytes, ranks=ranks, has_cores=True).algorithm
        elsewhere = choose(what, nbytes=nbytes, ranks=ranks, per_node=1, has_cores=True)
        assert elsewhere == choose(what, nbytes=nbytes, ranks=ranks, per_node=1)
        return "" if found == usual else found

    for nbytes in (8, 1 << 11, 1 << 12, 1 << 14, 1 << 15, 1 << 17, 1 << 18, 1 << 26):
        two_shots = "direct_two_shot" if 1 << 11 < nbytes <= 1 << 14 else ""
        assert [chosen(nbytes, ranks) for ranks in (2, 4, 17)] == ["", "", ""]
        assert [chosen(nbytes, ranks) for ranks in (5, 8)] == [two_shots, two_shots]
        ring = "ring" if nbytes >= 1 << 18 else two_shots
        assert [chosen(nbytes, ranks) for ranks in (9, 16)] == [ring, ring]
        assert chosen(nbytes, 16, Collective.ALL_GATHER) == ""
    assert chosen(1 << 13, 16, Collective.REDUCE_SCATTER) == ""
    assert chosen(1 << 14, 16, Collective.REDUCE_SCATTER) == "ring"


def test_all_sizes_of_a_class_are_treated_alike() -> None:
    assert [largest_of_class(size) for size in (0, 1, 2, 3, 4, 5)] == [0, 1, 2, 4, 4, 8]
    for size in (8_193, 10_000, 16_384):
        choice = choose(Collective.REDUCE, nbytes=size, ranks=4, per_node=2)
        assert choice.algorithm == "two_level"
        assert largest_of_class(size) == 16_384


def test_blocks_of_different_lengths() -> None:
    for override in ("", "bruck"):
        choice = choose(
            Collective.ALL_GATHER, nbytes=1 << 20, ranks=40, override=override, uneven=True
        )
        assert choice.algorithm == "direct"
        assert "lengths" in choice.reason


def test_override_applies_where_it_can() -> None:
    assert choose(Collective.ALL_REDUCE, nbytes=8, ranks=4, override="ring").algorithm == "ring"
    assert choose(Collective.BROADCAST, nbytes=8, ranks=4, override="ring").algorithm == "direct"


def test_a_model_decides_by_predicted_time() -> None:
    """What is chosen is what a simulation of every algorithm says is fastest."""
    model = read_model("ethernet_100g")
    for nbytes in (8, 1 << 17, 1 << 26):
        choice = choose(Collective.ALL_REDUCE, nbytes=nbytes, ranks=12, per_node=4, model=model)
        times = {}
        for name in ALGORITHMS[Collective.ALL_REDUCE]:
            program = build(Collective.ALL_REDUCE, name, ranks=12, per_node=4)
            times[name] = Simulation(program, model.links("", name).on(4)).run(nbytes).time_us
        assert times[choice.algorithm] <= min(times.values()) * 1.006
        time_us = times[choice.algorithm]
        assert f"predicted to take {time_us:.4g} us by ethernet_100g" in choice.reason


def test_lanes_are_used_where_they_pay() -> None:
    """Where each lane has a link of its own, two halves go faster than one whole."""
    links = Links("wide", (Level("all", math.inf, 1.0, 0.0, 1.0),))
    model = LinkModel("wide", "", "", 1, {"": {"other": links}})
    choice = choose(Collective.BROADCAST, nbytes=1 << 24, ranks=2, model=model)
    assert choice.copies == 2
    assert "x2" in widen(build(Collective.BROADCAST, choice.algorithm, ranks=2), 2).name


def test_unknown_override_names_the_known_ones() -> None:
    check_override("")
    check_override("ring")
    with pytest.raises(InvalidArgumentError, match=r"no algorithm 'rign'.*ring"):
        check_override("rign")


def test_several_nodes_with_several_ranks_reduce_at_home_first() -> None:
    def chosen(nbytes: int, ranks: int, per_node: int) -> str:
        return choose(
            Collective.ALL_REDUCE, nbytes=nbytes, ranks=ranks, per_node=per_node
        ).algorithm

    assert chosen(1 << 20, 8, 4) == "two_level"
    assert chosen(1 << 20, 7, 4) == "node_ring"  # the last node is not full
    assert chosen(1 << 20, 8, 1) == chosen(1 << 20, 8, 0) == "direct_two_shot"
    assert chosen(64, 8, 4) == "direct_one_shot"
    for collective in ("BROADCAST", "REDUCE", "ALL_GATHER", "REDUCE_SCATTER"):
        for ranks, nbytes, algorithm in (
            (8, 1 << 20, "two_level"),
            (8, 1 << 10, "direct"),
            (10, 1 << 20, "two_level" if collective in ("BROADCAST", "REDUCE") else "direct"),
        ):
            choice = choose(Collective[collective], nbytes=nbytes, ranks=ranks, per_node=4)
            assert choice.algorithm == algorithm


def test_hosts_of_one_rank_exchange_small_messages_in_pairs() -> None:
    def chosen(nbytes: int, ranks: int) -> str:
        return choose(Collective.ALL_REDUCE, nbytes=nbytes, ranks=ranks, per_node=1).algorithm

    assert chosen(8, 3) == chosen(1 << 17, 2) == "direct_one_shot"
    assert chosen(1 << 18, 2) == chosen(1 << 18, 16) == "direct_two_shot"
    assert chosen(8, 4) == chosen(1 << 17, 40) == "recursive_doubling"
    assert chosen(1 << 20, 4) == "direct_two_shot"


def test_hosts_of_one_rank_each_send_two_halves_at_once() -> None:
    def copies(nbytes: int, per_node: int) -> int:
        return choose(Collective.ALL_REDUCE, nbytes=nbytes, ranks=4, per_node=per_node).copies

    assert copies(1 << 20, 1) == 2
    assert copies(1 << 18, 1) == copies(1 << 20, 0) == copies(1 << 20, 2) == 1
