"""A tensor on a GPU or another device, as the checks of arguments see it.

It has as much of a NumPy array's face as they need. Its items are never touched here, but by the
library of the group that takes it (`delegated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


class Flags(NamedTuple):
    """What numpy.ndarray.flags says of memory."""

    c_contiguous: bool
    writeable: bool = True


class DeviceArray:
    """One tensor.

    Attributes:
        tensor: of torch.
        device: its kind of device, such as "cuda".
        dtype: NumPy's for the same items; what `arrays` makes of bfloat16.
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
