"""How an array is divided among ranks, if the caller says how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.calls.parts import part_sizes


def test_sizes_are_whole_numbers_of_any_kind() -> None:
    sizes: list[Any] = [np.int64(2), np.array(1), 2]
    found = part_sizes(np.zeros(5), sizes, 3, "all_to_all_single", "input")
    assert found == [2, 1, 2]


@pytest.mark.parametrize("sizes", [[1.0, 2, 2], [5, 0], [6, -1, 0], [1, 1, 1], "ab "])
def test_others_are_refused(sizes: list[int]) -> None:
    text = r"input_split_sizes=.* must be whole numbers, one for each rank \(3\), that add up to 5"
    with pytest.raises(InvalidArgumentError, match=text):
        part_sizes(np.zeros(5), sizes, 3, "all_to_all_single", "input")
