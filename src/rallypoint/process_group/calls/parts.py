"""How an array or tensor is divided among ranks: sizes of parts, and whether they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.process_group.memory.arrays import Array, describe


def check_items(array: Array, items: int, operation: str, name: str) -> None:
    """Refuse an array with the wrong number of items."""
    held = math.prod(array.shape)
    if held != items:
        raise InvalidArgumentError(
            f"{operation}: {name} is {describe(array)} and holds {held} items, but {items} are "
            "needed"
        )


def check_divides(array: Array, ranks: int, operation: str, name: str) -> None:
    """Refuse an array whose first dimension cannot be cut evenly."""
    if _length(array) % ranks:
        raise InvalidArgumentError(
            f"{operation}: the first dimension of {name}, {describe(array)}, is not divisible by "
            f"{ranks} ranks; give {name}_split_sizes"
        )


def part_sizes(
    array: Array, sizes: Sequence[int] | None, ranks: int, operation: str, name: str
) -> list[int]:
    """Each rank's share of an array's first dimension: as given, or evenly.

    Raises:
        InvalidArgumentError: the array cannot be cut so.
    """
    length = _length(array)
    if not sizes:
        check_divides(array, ranks, operation, name)
        return [length // ranks] * ranks
    try:
        found = [index(each) for each in sizes]
    except TypeError:  # no whole numbers
        found = []
    if len(found) != ranks or sum(found) != length or min(found) < 0:
        raise InvalidArgumentError(
            f"{operation}: {name}_split_sizes={list(sizes)} must be whole numbers, one for "
            f"each rank ({ranks}), that add up to {length}, the first dimension of {name}"
        )
    return found


def _length(array: Array) -> int:
    return array.shape[0] if array.ndim else 1
