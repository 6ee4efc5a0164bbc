"""Every collective of the public face, called by ranks that are threads, against NumPy."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

SHAPES = ((), (1,), (0,), (3, 5), (0, 4), (2, 3, 4), (9_001,), (70_001,))
RANKS = (1, 2, 3, 5)


def values(rank: int, shape: tuple[int, ...], seed: int = 0) -> Any:
    rng = np.random.default_rng([seed, rank])
    return rng.integers(-1000, 1000, shape).astype(np.int64)


def laid_out(array: Any, layout: str) -> Any:
    """The same array in other memory: contiguous, a strided or transposed view, or misaligned."""
    if layout == "misaligned":
        memory = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        memory[...] = array
        return memory
    if layout == "strided":
        wide = np.zeros((*array.shape, 3), array.dtype)
        wide[..., 1] = array
        return wide[..., 1]
    if layout == "transposed":
        return np.array(array.T, order="C").T
    return array.copy()


LAYOUTS = pytest.mark.parametrize("layout", ["contiguous", "strided", "transposed", "misaligned"])


@LAYOUTS
@pytest.mark.parametrize("ranks", RANKS)
def test_one_array(ranks: int, layout: str) -> None:
    def main(group: ProcessGroup) -> None:
        me = group.rank()
        for shape in SHAPES:
            inputs = [values(rank, shape) for rank in range(ranks)]
            mine = laid_out(inputs[me], layout)
            assert dist.all_reduce(mine, group=group) is None
            np.testing.assert_array_equal(mine, sum(inputs))
            for root in range(ranks):
                mine = laid_out(inputs[me], layout)
                dist.reduce(mine, root, dist.ReduceOp.MAX, group)
                wanted = np.max(inputs, axis=0) if me == root else inputs[me]
                np.testing.assert_array_equal(mine, wanted)
                mine = laid_out(inputs[me], layout)
                dist.broadcast(mine, root, group)
                np.testing.assert_array_equal(mine, inputs[root])
            dist.barrier(group)

    run_ranks(ranks, main)


@LAYOUTS
@pytest.mark.parametrize("ranks", RANKS)
def test_lists(ranks: int, layout: str) -> None:
    def main(group: ProcessGroup) -> None:
        me = group.rank()
        for shape in SHAPES:
            inputs = [values(rank, shape) for rank in range(ranks)]
            table = [[values(rank, shape, to + 1) for to in range(ranks)] for rank in range(ranks)]
            mine = laid_out(inputs[me], layout)
            row = [laid_out(array, layout) for array in table[me]]

            def fresh() -> list[Any]:
                return [laid_out(np.full(shape, -1, np.int64), layout) for _ in range(ranks)]  # noqa: B023

            out = fresh()
            dist.all_gather(out, mine, group)
            np.testing.assert_array_equal(out, inputs)
            for root in range(ranks):
                is_root = root == me
                out = fresh()
                dist.gather(mine, out if is_root else None, root, group)
                np.testing.assert_array_equal(out, inputs if is_root else np.full_like(inputs, -1))
                one = fresh()[0]
                dist.scatter(one, row if is_root else None, root, group)
                np.testing.assert_array_equal(one, table[root][me])
            one = fresh()[0]
            dist.reduce_scatter(one, row, group=group)
            np.testing.assert_array_equal(one, sum(table[rank][me] for rank in range(ranks)))
            out = fresh()
            dist.all_to_all(out, row, group)
            np.testing.assert_array_equal(out, [table[rank][me] for rank in range(ranks)])
            np.testing.assert_array_equal(row, table[me])  # inputs stay as they were
            np.testing.assert_array_equal(mine, inputs[me])

    run_ranks(ranks, main)


@LAYOUTS
@pytest.mark.parametrize("ranks", RANKS)
def test_large_arrays(ranks: int, layout: str) -> None:
    """The forms that hold all ranks' blocks in one array, concatenated or stacked."""

    def main(group: ProcessGroup) -> None:
        me = group.rank()
        for shape in ((1,), (0, 2), (2, 3), (4_001,)):
            inputs = [values(rank, shape) for rank in range(ranks)]
            wide = (ranks * shape[0], *shape[1:])
            table = [values(rank, wide, 7) for rank in range(ranks)]
            for into in (wide, (ranks, *shape)):
                out = laid_out(np.full(into, -1, np.int64), layout)
                dist.all_gather_into_tensor(out, laid_out(inputs[me], layout), group)
                np.testing.assert_array_equal(out, np.concatenate(inputs).reshape(into))
            out = laid_out(np.full(shape, -1, np.int64), layout)
            dist.reduce_scatter_tensor(out, laid_out(table[me], layout), group=group)
            total = sum(table).reshape(ranks, *shape)
            np.testing.assert_array_equal(out, total[me])
            out = laid_out(np.full(wide, -1, np.int64), layout)
            dist.all_to_all_single(out, laid_out(table[me], layout), group=group)
            mine = [part.reshape(ranks, *shape)[me] for part in table]
            np.testing.assert_array_equal(out, np.concatenate(mine))

    run_ranks(ranks, main)


@pytest.mark.parametrize("ranks", RANKS)
def test_blocks_of_different_lengths(ranks: int) -> None:
    def main(group: ProcessGroup) -> None:
        me = group.rank()
        for scale in (0, 1, 3_000):
            lengths = [scale * rank for rank in range(ranks)]
            out = [np.full(length, -1, np.int64) for length in lengths]
            dist.all_gather(out, np.full(lengths[me], me), group)
            for rank, array in enumerate(out):
                np.testing.assert_array_equal(array, np.full(lengths[rank], rank))
            mine = np.full(lengths[me], -1, np.int64)
            dist.reduce_scatter(mine, [np.full(n, me) for n in lengths], group=group)
            np.testing.assert_array_equal(mine, np.full(lengths[me], sum(range(ranks))))

            # Rank a sends a + 2 b rows to rank b, each of them saying from whom to whom.
            sent = [scale * (me + 2 * to) for to in range(ranks)]
            received = [scale * (rank + 2 * me) for rank in range(ranks)]
            rows = np.repeat([[me, to] for to in range(ranks)], sent, axis=0)
            into = np.full((sum(received), 2), -1)
            dist.all_to_all_single(into, rows, received, sent, group)
            wanted = np.repeat([[rank, me] for rank in range(ranks)], received, axis=0)
            np.testing.assert_array_equal(into, wanted)

    run_ranks(ranks, main)


def test_in_place() -> None:
    """A rank's own block of the larger array may be the smaller one, and nothing else may harm."""
    ranks = 3

    def main(group: ProcessGroup) -> None:
        me = group.rank()
        for count in (1, 5_000):
            whole = np.full((ranks, count), -1)
            whole[me] = me
            dist.all_gather_into_tensor(whole, whole[me], group)
            assert (whole == np.arange(ranks)[:, None]).all()
            whole = np.full((ranks, count), -1)
            whole[0] = me
            dist.all_gather_into_tensor(whole, whole[0], group)  # not its own block: copied first
            assert (whole == np.arange(ranks)[:, None]).all()
            whole = np.full((ranks, count), me)
            dist.reduce_scatter_tensor(whole[me], whole, group=group)
            assert (whole[me] == 3).all()
            row = np.arange(ranks * count) + 1_000 * me
            dist.all_to_all_single(row, row, group=group)
            first = np.arange(me * count, (me + 1) * count)
            assert (row.reshape(ranks, count) == first + 1_000 * np.arange(ranks)[:, None]).all()

    run_ranks(ranks, main)


def test_send_and_receive() -> None:
    def main(group: ProcessGroup) -> None:
        me, ranks = group.rank(), group.size()
        for count in (0, 1, 300_000):
            for layout in ("contiguous", "strided"):
                token = laid_out(np.full(count, me), layout)
                if me == 0:
                    dist.send(token, 1, group, tag=3)
                    assert dist.recv(token, ranks - 1, group) == ranks - 1
                else:
                    assert dist.recv(token, group_src=me - 1, group=group, tag=3 * (me == 1)) == (
                        me - 1
                    )
                    assert (token == 0).all()
                    dist.send(token, group_dst=(me + 1) % ranks, group=group)

    run_ranks(4, main)


def test_read_only_sources() -> None:
    def main(group: ProcessGroup) -> None:
        me = group.rank()
        fixed = np.arange(4.0) if me == 0 else np.zeros(4)
        fixed.flags.writeable = me != 0
        dist.broadcast(fixed, 0, group)
        assert (fixed == np.arange(4)).all()
        constant = np.full(3, me)
        constant.flags.writeable = False
        out = [np.zeros(3, np.int64) for _ in range(2)]
        dist.all_gather(out, constant, group)
        assert (np.array(out) == [[0] * 3, [1] * 3]).all()
        dist.reduce(constant if me else np.zeros(3, np.int64), 0, group=group)
        if me == 0:
            dist.send(constant, 1, group)
        else:
            dist.recv(out[0], 0, group)

    run_ranks(2, main)


def too_long_for_itself(group: ProcessGroup) -> None:
    taken = [np.ones(2), np.ones(2)]
    taken[group.own_rank] = np.ones(50)  # else what lies behind the two that are given
    dist.all_to_all(taken, [np.ones(2), np.ones(2)], group=group)


def test_wrong_arguments() -> None:
    def main(group: ProcessGroup) -> None:
        x, y = np.ones(4), np.ones(4, np.float32)
        calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
            (TypeError, "must be a list", lambda: dist.all_gather(x, x, group)),  # type: ignore[arg-type]
            (
                ValueError,
                "of the group's 2 ranks, but has 1",
                lambda: dist.all_gather([x], x, group),
            ),
            (ValueError, "dtypes must be equal", lambda: dist.all_gather([x, y], x, group)),
            (ValueError, "but 8 are needed", lambda: dist.all_gather_into_tensor(x, x, group)),
            (ValueError, "one of dst and group_dst", lambda: dist.reduce(x, group=group)),
            (ValueError, "src=2 is not a rank", lambda: dist.broadcast(x, 2, group)),
            (ValueError, "cannot both", lambda: dist.broadcast(x, 0, group, group_src=0)),
            (ValueError, "group_src=5 is not", lambda: dist.broadcast(x, None, group, group_src=5)),
            (
                ValueError,
                "not divisible",
                lambda: dist.all_to_all_single(x[:3], x[:3], group=group),
            ),
            (
                ValueError,
                r"each rank \(2\)",
                lambda: dist.all_to_all_single(x, x, [1, 2], [2, 2], group),
            ),
            (ValueError, "is sent to this rank itself", lambda: too_long_for_itself(group)),
            (TypeError, "not builtins.list", lambda: dist.all_reduce([1], group=group)),  # type: ignore[arg-type]
            (TypeError, "what new_group returned", lambda: dist.barrier(3)),
            (ValueError, "has not been initialized", dist.barrier),
        ]
        for kind, words, call in calls:
            with pytest.raises(kind, match=words):
                call()
        dist.all_reduce(x, group=group)  # none of this has hurt the group
        assert (x == 2).all()

    run_ranks(2, main)


@pytest.mark.slow
def test_collectives_of_arrays_in_arenas_and_not(seed: int) -> None:
    """Some ranks have them in arenas, some not; which, changes from call to call."""
    ranks = 4

    def main(group: ProcessGroup) -> None:
        me, common = group.rank(), random.Random(seed)
        own = random.Random(seed + me)
        for number in range(60):
            count = common.choice([3, 2_000, 20_000, 150_000, 700_000])

            def new(items: int, value: int) -> Any:
                array = (dist.empty if own.random() < 0.6 else np.empty)(items, np.int64)
                array[...] = value
                return array

            mine = new(count, me + number)
            dist.all_reduce(mine, group=group)
            assert (mine == sum(range(ranks)) + ranks * number).all()
            everything = new(count * ranks, -1)
            dist.all_gather_into_tensor(everything, new(count, me), group=group)
            assert (everything.reshape(ranks, count) == np.arange(ranks)[:, None]).all()
            told = new(count, number if me == number % ranks else -1)
            dist.broadcast(told, number % ranks, group=group)
            assert (told == number).all()
            part = new(count, -1)
            dist.reduce_scatter_tensor(part, new(count * ranks, me), group=group)
            assert (part == sum(range(ranks))).all()

    run_ranks(ranks, main)
