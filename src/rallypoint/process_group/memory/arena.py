"""Arrays that other processes of this host can map, so that communicating them needs no copy.

An array of `empty` is used like any other. In a collective whose ranks are on one host, peers read
it in place. It works with and without a group.
"""

from __future__ import annotations

import errno
import math
import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import DTypeLike, NDArray

from rallypoint._native import allocate
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rallypoint.base.refusals import refused


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike = float) -> NDArray[Any]:
    """A new C-contiguous array in memory that this host's other ranks read without copying it.

    Args:
        shape, dtype: as in numpy.empty. The contents of the array are not specified.

    The memory is freed when the last array that refers to it is collected. It has no name in the
    file system. After os.fork, parent and child share it. `torch.from_numpy(empty(...))` is a
    tensor of the same memory.

    Raises:
        InvalidTypeError: the shape is not a shape, or the dtype has no fixed size (objects cannot
            be shared).
        InvalidArgumentError: a length is negative.
        OutOfMemoryError: there is not enough memory, or address space for it.
    """
    try:
        lengths = [int(n) for n in shape] if isinstance(shape, Sequence) else [shape.__index__()]
        items = np.dtype(dtype)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidTypeError(f"empty: {error}; pass a shape and a dtype") from None
    if items.hasobject or items.itemsize == 0:
        raise InvalidTypeError(f"empty takes dtypes of fixed size, not {items!r}")
    if min(lengths, default=0) < 0:
        raise InvalidArgumentError(f"empty: the shape {lengths} has a negative length")
    nbytes = math.prod(lengths) * items.itemsize
    block = allocate(nbytes) if nbytes <= sys.maxsize else None
    if block is None:
        raise OutOfMemoryError(
            f"empty: the system could not provide {nbytes} bytes of shared memory for an array of "
            f"shape {lengths}: {refused('mmap', errno.ENOMEM)}"
        )
    return block.view(items).reshape(lengths)
