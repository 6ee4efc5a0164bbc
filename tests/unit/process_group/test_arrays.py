"""Arrays of unusual types and places."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.arrays import as_array, describe, part_sizes
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

# What h5py notes of enumerations, and of text.
NOTES: list[dict[str, Any]] = [{"enum": {"RED": 0, "GREEN": 1}}, {"vlen": str}, {"items": "mine"}]


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
@pytest.mark.parametrize("note", NOTES, ids=lambda note: next(iter(note)))
def test_what_others_note_of_a_type_changes_nothing(note: dict[str, Any], background: bool) -> None:
    dtype = np.dtype(np.int16, metadata=note)

    def main(group: ProcessGroup) -> None:
        array = np.full(3, 1000 + group.rank(), dtype)
        work = dist.all_reduce(array, group=group, async_op=background)
        if work is not None:
            work.wait()
        assert array.tolist() == [2001] * 3

    run_ranks(2, main)


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
def test_an_empty_part_may_lie_anywhere(background: bool) -> None:
    def main(group: ProcessGroup) -> None:
        memory = np.frombuffer(bytearray(65), np.uint8)
        empty = memory[1:].view(np.float64)[:0]
        assert empty.ctypes.data % 8 != 0
        mine = np.full(4 * group.rank(), 7.0)
        parts = [np.empty(0), np.empty(4)]
        parts[0] = empty
        works = [
            dist.all_reduce(empty, group=group, async_op=background),
            dist.all_gather(
                parts, mine if group.rank() else empty, group=group, async_op=background
            ),
        ]
        for work in works:
            if work is not None:
                work.wait()
        assert (parts[1] == 7).all()

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (np.zeros((3, 5), np.float32), "float32[3, 5]"),
        ([np.zeros(2), np.zeros(3)], "2 x float64[2]"),
        ((), "an empty list"),
        (7, "int"),
        ({"a": 1}, "dict"),
        (None, "None"),
    ],
)
def test_values_in_words(value: object, told: str) -> None:
    assert told in describe(value)


@pytest.mark.needs_torch
def test_a_tensor_without_items_has_no_memory() -> None:
    import torch

    taken = as_array(torch.empty(0, 3, dtype=torch.float16), "all_reduce")
    assert taken.shape == (0, 3)
    assert taken.dtype == np.float16


def test_sizes_are_whole_numbers_of_any_kind() -> None:
    sizes: list[Any] = [np.int64(2), np.array(1), 2]
    found = part_sizes(np.zeros(5), sizes, 3, "all_to_all_single", "input")
    assert found == [2, 1, 2]


@pytest.mark.parametrize("sizes", [[1.0, 2, 2], [5, 0], [6, -1, 0], [1, 1, 1], "ab "])
def test_others_are_refused(sizes: list[int]) -> None:
    text = r"input_split_sizes=.* must be whole numbers, one for each rank \(3\), that add up to 5"
    with pytest.raises(InvalidArgumentError, match=text):
        part_sizes(np.zeros(5), sizes, 3, "all_to_all_single", "input")
