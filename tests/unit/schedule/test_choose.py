"""The choice of an algorithm: deterministic, reasoned, and open to an override."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.schedule.choose import ALGORITHMS, check_override, choose
from rallypoint.schedule.program import Collective


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
    assert chosen(1 << 26, 2) == "direct_one_shot"


def test_override_applies_where_it_can() -> None:
    assert choose(Collective.ALL_REDUCE, nbytes=8, ranks=4, override="ring").algorithm == "ring"
    assert choose(Collective.BROADCAST, nbytes=8, ranks=4, override="ring").algorithm == "direct"


def test_unknown_override_names_the_known_ones() -> None:
    check_override("")
    check_override("ring")
    with pytest.raises(InvalidArgumentError, match=r"no algorithm 'rign'.*ring"):
        check_override("rign")
