"""Messages that are read where they lie: in private memory, by the kernel, and in arenas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rallypoint.engine.communicator import Communicator, ReduceOp
from rallypoint.schedule.program import Collective
from tests.unit.engine.ranks import run_ranks
from tests.unit.engine.test_collectives import CASES, LARGE, check_calls


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
