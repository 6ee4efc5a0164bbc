"""Messages that are read where they lie: in private memory, by the kernel, and in arenas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rallypoint._native import addresses_of
from rallypoint.engine.communicator import Communicator, ReduceOp
from rallypoint.schedule.program import Collective
from tests.unit.engine.ranks import run_ranks
from tests.unit.engine.test_collectives import CASES, LARGE, check_calls


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_equals_numpy(collective: Collective, name: str, ranks: int) -> None:
    """Of sizes around which messages are copied or not, and of several pieces."""
    root = ranks - 1 if collective.has_root else 0
    calls = [(count, root, way) for count in (1_023, 5_000, 70_001) for way in (False, True)]
    check_calls(collective, name, ranks, [*calls, (LARGE, root, True)])


def test_the_sender_keeps_its_memory_until_all_have_read(transport: str) -> None:
    """It changes its array as soon as its call is over, again and again."""

    def main(communicator: Communicator) -> None:
        array = np.empty(200_000)
        for number in range(100):
            array[...] = number if communicator.rank == 0 else -1
            assert communicator.run(Collective.BROADCAST, ReduceOp.SUM, 0, array, array) == 0
            assert (array == number).all()

    run_ranks(3, main)


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MAX])
@pytest.mark.parametrize("name", ["direct_two_shot", "ring"])
def test_the_same_bits_as_by_copies(transport: str, name: str, op: ReduceOp) -> None:
    def main(communicator: Communicator) -> Any:
        array = np.random.default_rng(communicator.rank).standard_normal(300_001)
        values: Any = array.astype(np.float32)
        assert communicator.run(Collective.ALL_REDUCE, op, 0, values, values) == 0
        return values.tobytes()

    copied = run_ranks(3, main, override=name, transport="shm")
    read = run_ranks(3, main, override=name)
    assert {*copied, *read} == {copied[0]}


def test_many_places_of_a_rank_are_copied() -> None:
    """More than one call of the kernel takes, of all lengths; or none of what is not there."""
    draw = np.random.default_rng(0)
    theirs: list[Any] = [draw.standard_normal(length) for length in draw.integers(0, 5000, 200)]

    def main(communicator: Communicator) -> None:
        if communicator.rank == 0:
            return
        read, mine = communicator.native.read_memory, [np.zeros_like(each) for each in theirs]
        addresses = addresses_of(theirs)
        assert read(0, addresses, mine)
        assert all(one.tobytes() == two.tobytes() for one, two in zip(mine, theirs, strict=True))
        nowhere = b"\0" * 8
        assert not read(0, addresses[:-8] + nowhere, mine)
        assert read(0, b"", [])
        for rank, words, arrays in [(0, addresses, mine[1:]), (2, addresses, mine)]:
            with pytest.raises(ValueError, match="an address of that rank for each array"):
                read(rank, words, arrays)
        with pytest.raises(ValueError, match="not an array"):
            read(0, nowhere, [np.zeros((3, 4)).T])

    run_ranks(2, main)
