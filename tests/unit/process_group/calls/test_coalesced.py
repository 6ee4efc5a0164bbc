"""Several collectives as one call, against what NumPy says of each."""

from __future__ import annotations

import random

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.base.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    MismatchError,
    NotInitializedError,
)
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

SIZES = (0, 1, 5, 3000, 70_000)


def inputs_of(rank: int) -> list[np.ndarray]:
    chance = np.random.default_rng(rank)
    return [chance.integers(0, 99, size).astype(np.float32) for size in SIZES]


@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce_and_all_gather(async_op: bool) -> None:
    ranks = 3

    def main(group: ProcessGroup) -> None:
        arrays = inputs_of(group.rank())
        work = dist.all_reduce_coalesced(arrays, dist.ReduceOp.MAX, group, async_op)
        gathered = [[np.full(size, -1, np.float32) for size in SIZES] for _ in range(ranks)]
        other = dist.all_gather_coalesced(gathered, inputs_of(group.rank()), group, async_op)
        for each in (work, other):
            assert (each is not None) == async_op
            assert each is None or each.wait()
        of_all = [inputs_of(rank) for rank in range(ranks)]
        for index, array in enumerate(arrays):
            assert (array == np.max([each[index] for each in of_all], axis=0)).all()
        for rank in range(ranks):
            assert all(map(np.array_equal, gathered[rank], of_all[rank]))

    run_ranks(ranks, main)


def test_arrays_of_different_lengths_on_each_rank() -> None:
    def main(group: ProcessGroup) -> None:
        lists = [[np.zeros(rank + 1), np.zeros(2 * rank)] for rank in range(3)]
        me = group.rank()
        mine = [np.full(me + 1, me, float), np.full(2 * me, -me, float)]
        dist.all_gather_coalesced(lists, mine, group)
        for rank, (one, other) in enumerate(lists):
            assert (one == rank).all() and (other == -rank).all()

    run_ranks(3, main)


def test_wrong_lists_are_refused() -> None:
    def main(group: ProcessGroup) -> None:
        one = np.ones(2)
        for lists in ([[one]], [[one], [one, one]], [[one], []]):
            with pytest.raises(InvalidArgumentError, match="2 lists, one for each rank, of 1"):
                dist.all_gather_coalesced(lists, [one], group)
        with pytest.raises(InvalidTypeError, match="a list of arrays"):
            dist.all_gather_coalesced([[one], [one]], one, group)  # type: ignore[arg-type]

    run_ranks(2, main)


@pytest.mark.parametrize("async_ops", [False, True])
def test_a_block_of_any_collectives(async_ops: bool, seed: int) -> None:
    """In random order, with arrays that are strided, also twice in a row."""
    ranks = 3

    def main(group: ProcessGroup) -> None:
        chance, me = random.Random(seed), group.rank()
        for _ in range(2):
            expected: list[tuple[np.ndarray, object]] = []
            with dist._coalescing_manager(group, async_ops=async_ops) as manager:
                for step in range(40):
                    size = chance.choice(SIZES)
                    array = np.full((size, 2), float(me + step))[:, 0]
                    total = ranks * step + 3.0
                    match chance.randrange(6):
                        case 0:
                            assert dist.all_reduce(array, group=group) is None
                            expected.append((array, total))
                        case 1:
                            dist.all_reduce(array, dist.ReduceOp.MAX, group)
                            expected.append((array, step + 2))
                        case 2:
                            dist.broadcast(array, group=group, group_src=1)
                            expected.append((array, step + 1))
                        case 3:
                            whole = np.zeros(size * ranks)
                            dist.all_gather_single(whole, array, group)
                            expected.append((whole, np.repeat([step, step + 1, step + 2], size)))
                        case 4:
                            part = np.zeros(size)
                            dist.reduce_scatter_single(part, np.tile(array, ranks), group=group)
                            expected.append((part, total))
                        case 5:
                            dist.barrier(group)
            if async_ops:
                assert manager.wait()
            for got, wanted in expected:
                assert (got == wanted).all()
        dist.all_reduce(array, group=group)  # as ever

    run_ranks(ranks, main)


def test_what_a_block_refuses() -> None:
    def main(group: ProcessGroup) -> None:
        with dist._coalescing_manager(group):
            with (
                pytest.raises(InvalidArgumentError, match="already open"),
                dist._coalescing_manager(group),
            ):
                pass
            with pytest.raises(InvalidArgumentError, match="outside of _coalescing_manager"):
                dist.all_gather_object([None, None], 1, group)
        with pytest.raises(ZeroDivisionError), dist._coalescing_manager(group):
            raise ZeroDivisionError
        array = np.ones(1)
        dist.all_reduce(array, group=group)
        assert array == 2

    run_ranks(2, main)


def test_a_group_destroyed_in_a_block_stays_so() -> None:
    def main(group: ProcessGroup) -> None:
        with dist._coalescing_manager(group):
            group.destroy()
        with pytest.raises(NotInitializedError, match="was destroyed"):
            dist.all_reduce(np.ones(1), group=group)

    run_ranks(2, main)


def test_a_mismatch_in_a_block_names_the_line() -> None:
    def main(group: ProcessGroup) -> None:
        with pytest.raises(MismatchError) as caught, dist._coalescing_manager(group):
            dist.all_reduce(np.ones(3 + group.rank()), group=group)
        assert "test_coalesced.py:" in str(caught.value)

    run_ranks(2, main)


def test_an_error_comes_when_nothing_changes_the_arrays_any_more() -> None:
    def main(group: ProcessGroup) -> None:
        array = np.ones(3_000_000)
        with pytest.raises(InvalidTypeError):
            dist.all_reduce_coalesced([array, "no array"], group=group)  # type: ignore[list-item]
        assert (array == 2).all()
        lists = [[np.zeros(1_000_000), np.zeros(2)] for _ in range(2)]
        with pytest.raises(InvalidTypeError):
            dist.all_gather_coalesced(lists, [np.ones(1_000_000), "no"], group)  # type: ignore[list-item]
        assert all((one == 1).all() for one, _ in lists)

    run_ranks(2, main)
