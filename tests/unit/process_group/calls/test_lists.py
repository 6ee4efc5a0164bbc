"""Lists of arrays, one for each rank: plain ones the engine takes as they are, others come out the
same, and what is none is refused before anything is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

RANKS = 3
SIZES = [0, 1, 5, 9_000, 40_000]  # the last ones are not copied on the way
Arrays = list[np.ndarray[Any, Any]]


def given(rank: int, size: int) -> Arrays:
    """What a rank has for each."""
    return [np.random.default_rng((rank, to, size)).integers(0, 99, size) for to in range(RANKS)]


def plain(size: int) -> np.ndarray[Any, Any]:
    return np.zeros(size, np.int64)


def strided(size: int) -> np.ndarray[Any, Any]:
    return np.zeros(2 * size, np.int64)[::2]


def shaped(size: int) -> np.ndarray[Any, Any]:
    return np.zeros((size, 1), np.int64)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [plain, strided, shaped])
@pytest.mark.parametrize("operation", ["all_gather", "gather", "scatter", "reduce_scatter"])
def test_every_form_comes_out_the_same(
    operation: str, make: Callable[[int], np.ndarray[Any, Any]], size: int
) -> None:
    root = 1
    whole = [given(rank, size) for rank in range(RANKS)]

    def main(group: ProcessGroup) -> None:
        rank = group.rank()
        own = whole[rank][0]
        many = [make(size) for _ in range(RANKS)]
        one = make(size)
        if operation in ("scatter", "reduce_scatter"):
            for array, values in zip(many, whole[rank], strict=True):
                array[...] = values.reshape(array.shape)
        listed = many if rank == root else None
        match operation:
            case "all_gather":
                dist.all_gather(many, own, group)
            case "gather":
                dist.gather(own, listed, root, group)
            case "scatter":
                dist.scatter(one, listed, root, group)
                np.testing.assert_array_equal(one.reshape(-1), whole[root][rank])
            case "reduce_scatter":
                dist.reduce_scatter(one, many, group=group)
                due = functools.reduce(np.add, [each[rank] for each in whole])
                np.testing.assert_array_equal(one.reshape(-1), due)
        if operation == "all_gather" or (operation == "gather" and rank == root):
            for array, from_rank in zip(many, whole, strict=True):
                np.testing.assert_array_equal(array.reshape(-1), from_rank[0])

    run_ranks(RANKS, main)


@pytest.mark.parametrize("place", range(RANKS))
def test_the_list_may_hold_the_array_itself(place: int) -> None:
    whole = [given(rank, 7)[0] for rank in range(RANKS)]

    def main(group: ProcessGroup) -> None:
        own = whole[group.rank()].copy()
        many = [np.zeros(7, np.int64) for _ in range(RANKS)]
        many[place] = own
        dist.all_gather(many, own, group)
        for array, values in zip(many, whole, strict=True):
            np.testing.assert_array_equal(array, values)

    run_ranks(RANKS, main)


def _read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(4)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (bytearray(32), InvalidTypeError),
        (memoryview(bytearray(32)), InvalidTypeError),
        (None, InvalidTypeError),
        (_read_only(), InvalidTypeError),
        (np.zeros(4, np.float32), InvalidArgumentError),
        (np.zeros(4, ">f8"), InvalidTypeError),
        (np.zeros(5), InvalidArgumentError),
    ],
    ids=["bytearray", "memoryview", "None", "read-only", "dtype", "byte order", "length"],
)
def test_what_does_not_fit_is_refused_at_once(item: object, error: type[Exception]) -> None:
    def main(group: ProcessGroup) -> None:
        many: list[Any] = [np.zeros(4) for _ in range(RANKS)]
        many[0] = item
        if group.rank() == 0:
            with pytest.raises(error):
                dist.gather(np.zeros(4), many, 0, group)
        found = [np.zeros(4) for _ in range(RANKS)] if group.rank() == 0 else None
        dist.gather(np.full(4, group.rank(), float), found, 0, group)  # nothing has been sent
        assert found is None or [array[0] for array in found] == [0, 1, 2]

    run_ranks(RANKS, main)


@pytest.mark.parametrize("count", [0, RANKS - 1, RANKS + 1])
def test_a_list_of_another_length(count: int) -> None:
    def main(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match=f"group's {RANKS} ranks, but has {count}"):
            dist.all_gather([np.zeros(4) for _ in range(count)], np.zeros(4), group)

    run_ranks(RANKS, main)
