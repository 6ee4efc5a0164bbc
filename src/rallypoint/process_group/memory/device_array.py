"""A tensor on a GPU or another device, as the checks of arguments see it.

It has the part of a NumPy array's interface that they need. Only the library of the group that
takes it accesses its items (`delegated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Flags(NamedTuple):
    """The part of numpy.ndarray.flags that describes memory."""

    c_contiguous: bool
    writeable: bool = True


class DeviceArray:
    """One tensor.

    Attributes:
        tensor: torch's.
        device: its kind of device, such as "cuda".
        dtype: NumPy's for the same items; for bfloat16, what `arrays` uses.
    """

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:  # noqa: ANN401 - of torch
        self.tensor = tensor
        self.device: str = tensor.device.type
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.shape: Sequence[int] = tuple(tensor.shape)
        self.ndim = len(self.shape)
        self.size: int = tensor.numel()
        self.nbytes = self.size * self.itemsize
        self.flags = Flags(c_contiguous=tensor.is_contiguous())

    def __getitem__(self, part: slice) -> DeviceArray:
        """A part along the first dimension."""
        return DeviceArray(self.tensor[part], self.dtype)
