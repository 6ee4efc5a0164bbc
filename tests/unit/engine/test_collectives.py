"""Every algorithm of every collective, run by the native engine, against NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rallypoint.engine.communicator import Communicator, ReduceOp
from rallypoint.process_group.arrays import empty
from rallypoint.schedule.catalogue import ALGORITHMS
from rallypoint.schedule.program import Collective
from tests.unit.engine import ranks as ranks_module
from tests.unit.engine.ranks import run_ranks

# Inline, one slot, chunks of uneven length, several pieces, the ring of slots wrapping.
COUNTS = (0, 1, 13, 1_000, 70_001)
LARGE = 500_003
COLLECTIVES = [c for c in Collective if c not in (Collective.SEND, Collective.BARRIER)]
CASES = [(c, name) for c in COLLECTIVES for name in ALGORITHMS[c]]


def inputs_of(collective: Collective, ranks: int, root: int, count: int) -> list[Any]:
    rng = np.random.default_rng(count)
    blocks = [collective.input_blocks(ranks, is_root=rank == root) for rank in range(ranks)]
    return [rng.integers(-99, 99, (number, count)).astype(np.int64) for number in blocks]


def wanted(collective: Collective, inputs: list[Any], rank: int, root: int) -> Any:
    """The definition, in NumPy; None where a rank gets nothing."""
    if collective in (Collective.REDUCE, Collective.GATHER) and rank != root:
        return None
    match collective:
        case _ if collective.reduces:
            total = np.sum(inputs[: rank + 1] if collective is Collective.SCAN else inputs, axis=0)
            return total[rank : rank + 1] if len(total) > 1 else total
        case Collective.BROADCAST:
            return inputs[root]
        case Collective.ALL_GATHER | Collective.GATHER:
            return np.concatenate(inputs)
        case Collective.SCATTER:
            return inputs[root][rank : rank + 1]
    return np.stack([values[rank] for values in inputs])


def new(shape: tuple[int, ...]) -> Any:
    in_arena = ranks_module.chosen_transport in ("arenas", "shared")
    return empty(shape, np.int64) if in_arena else np.empty(shape, np.int64)


def buffers(
    collective: Collective, mine: Any, ranks: int, rank: int, root: int, in_place: bool
) -> tuple[Any, Any]:
    """Input and output of a rank; in place, one block of the larger is the smaller."""
    is_root = rank == root
    output = new((collective.output_blocks(ranks, is_root=is_root), mine.shape[1]))
    output[...] = -1
    alias = collective.alias(rank, is_root=is_root) if in_place else None
    source = new(mine.shape)
    source[...] = mine
    if alias is None:
        return source, output
    if len(mine) > len(output):
        return source, source[alias[0] : alias[0] + 1]
    output[alias[1]] = mine[0]
    return output[alias[1] : alias[1] + 1], output


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_equals_numpy(collective: Collective, name: str, ranks: int) -> None:
    """All roots, in place and not; the input stays as it was, but for its part of the output."""
    roots = range(ranks) if collective.has_root else (0,)
    calls = [(count, root, way) for count in COUNTS for root in roots for way in (False, True)]
    check_calls(collective, name, ranks, [*calls, (LARGE, 0, True)])


def check_calls(
    collective: Collective, name: str, ranks: int, calls: Sequence[tuple[int, int, bool]]
) -> None:
    """Calls with so many items, this root, and in place or not."""

    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        for count, root, in_place in calls:
            inputs = inputs_of(collective, ranks, root, count)
            source, target = buffers(collective, inputs[rank], ranks, rank, root, in_place)
            code = communicator.run(collective, ReduceOp.SUM, root, source, target)
            assert code == 0, communicator.error(name)
            expected = wanted(collective, inputs, rank, root)
            if expected is not None:
                np.testing.assert_array_equal(target, expected)
            if not in_place:
                np.testing.assert_array_equal(source, inputs[rank])

    run_ranks(ranks, main, override=name)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_more_messages_than_slots(collective: Collective, name: str) -> None:
    """Eight ranks and blocks of several slots: nobody may wait for a slot of one who waits."""
    ranks = 8

    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        inputs = inputs_of(collective, ranks, 0, LARGE // 2)
        source, target = buffers(collective, inputs[rank], ranks, rank, 0, False)
        code = communicator.run(collective, ReduceOp.SUM, 0, source, target)
        assert code == 0, communicator.error(name)
        expected = wanted(collective, inputs, rank, 0)
        if expected is not None:
            np.testing.assert_array_equal(target, expected)

    run_ranks(ranks, main, override=name)
