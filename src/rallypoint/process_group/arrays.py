"""Converts what a caller passes to memory that the engine can take, and checks its size.

An argument is a NumPy array or a PyTorch tensor. CPU memory becomes a NumPy view of the same
memory, so all further code knows only arrays; a tensor on another device becomes a `DeviceArray`,
which few backends take. Torch is recognised by name and never imported. Memory that is not
contiguous is copied, and copied back after the call. `empty` makes arrays that need no copy.
"""

from __future__ import annotations

import errno
import math
import operator
import sys
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias, cast

import numpy as np

from rallypoint._native import allocate
from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError, OutOfMemoryError
from rallypoint.engine.communicator import DTYPES

if TYPE_CHECKING:  # importing it takes as long as all of this package
    from numpy.typing import DTypeLike


class DeviceArray:
    """A tensor on another device, with the part of a NumPy array's interface that calls need.

    Only the library of the group that takes it accesses its items (`delegated`).
    """

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:  # noqa: ANN401 - of torch
        self.tensor = tensor
        self.device: str = tensor.device.type  # such as "cuda"
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.shape: Sequence[int] = tuple(tensor.shape)
        self.ndim = len(self.shape)
        self.size: int = tensor.numel()
        self.nbytes = self.size * self.itemsize
        self.flags = SimpleNamespace(
            c_contiguous=tensor.is_contiguous(), aligned=True, writeable=True
        )

    def __getitem__(self, part: slice) -> DeviceArray:
        """A part along the first dimension."""
        return DeviceArray(self.tensor[part], self.dtype)


Array = np.ndarray[Any, np.dtype[Any]]
# An array of all blocks, one after the other; or an array for each; or None: no block.
Blocks: TypeAlias = Array | Sequence[Array] | None

# NumPy has no bfloat16. Its bits are passed as unsigned integers, with a note of what they are.
_NOTE = "rallypoint.bfloat16"  # h5py and others keep their own notes
_BFLOAT16 = np.dtype(np.uint16, metadata={_NOTE: True})

_DTYPES = {name: np.dtype(name) for name in DTYPES if name != "bfloat16"}
_NAMES = {np.dtype(code).num: np.dtype(code).name for code in np.typecodes["AllInteger"] + "?efdFD"}


def as_array(value: object, operation: str, *, writes: bool = False) -> Array:
    """A view of the caller's array or tensor, checked to be one that the operation can take."""
    array = value if isinstance(value, np.ndarray) else _from_other(value, operation, writes)
    if array.itemsize == 2 and array.dtype.num not in _NAMES and array.dtype.name == "bfloat16":
        array = array.view(_BFLOAT16)  # as other packages, such as ml_dtypes, give NumPy the type
    if dtype_name(array) not in DTYPES or not array.dtype.isnative:
        raise InvalidTypeError(
            f"{operation} takes arrays of {', '.join(DTYPES)} in native byte order, not "
            f"{array.dtype!r}; convert it with astype()"
        )
    if writes and not array.flags.writeable:
        raise InvalidTypeError(
            f"{operation} writes its result into the array, but this one is read-only; "
            "pass a writable copy"
        )
    return array


def as_arrays(
    values: object, operation: str, name: str, *, count: int, writes: bool = False
) -> list[Array]:
    """Views of a list of `count` arrays, which the caller passed as argument `name`."""
    if not isinstance(values, list | tuple):
        raise InvalidTypeError(
            f"{operation}: {name} must be a list of arrays, one for each rank, not "
            f"{_type_name(values)}"
        )
    if len(values) != count:
        raise InvalidArgumentError(
            f"{operation}: {name} must have an array for each of the group's {count} ranks, "
            f"but has {len(values)}"
        )
    return [as_array(value, operation, writes=writes) for value in values]


def check_count(tensors: Sequence[object], ranks: int, operation: str, side: str) -> None:
    """Refuse a list that does not have one element for each rank."""
    if len(tensors) != ranks:
        raise InvalidArgumentError(
            f"{operation}: {len(tensors)} {side} tensors for {ranks} ranks; pass one for each"
        )


def check_alike(arrays: Iterable[Array], model: Array, operation: str, name: str) -> None:
    """Check that arrays have the dtype of `model`."""
    for index, array in enumerate(arrays):
        if dtype_name(array) != dtype_name(model):
            raise InvalidArgumentError(
                f"{operation}: {name}[{index}] is {describe(array)}, but another array of the call "
                f"is {describe(model)}; their dtypes must be equal"
            )


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
    """Each rank's share of an array's first dimension: as given, or evenly."""
    length = _length(array)
    if not sizes:
        check_divides(array, ranks, operation, name)
        return [length // ranks] * ranks
    try:
        found = [operator.index(each) for each in sizes]
    except TypeError:  # no whole numbers
        found = []
    if len(found) != ranks or sum(found) != length or min(found) < 0:
        raise InvalidArgumentError(
            f"{operation}: {name}_split_sizes={list(sizes)} must be whole numbers, one for "
            f"each rank ({ranks}), that add up to {length}, the first dimension of {name}"
        )
    return found


def dtype_name(array: Array) -> str:
    """The name of the type of an array's items."""
    dtype = array.dtype
    if dtype.metadata is not None and _NOTE in dtype.metadata:
        return "bfloat16"
    return _NAMES.get(dtype.num) or dtype.name


def address(array: Array) -> int:
    """The address of an array's memory."""
    found: int = array.__array_interface__["data"][0]
    return found


def packed(array: Array) -> Array:
    """The same items in memory that engine and libraries take; the array itself if it is such."""
    return array if is_packed(array) else copied(array)


def is_packed(array: Array) -> bool:
    """Whether the engine and libraries can take an array's memory as it is."""
    return array.flags.c_contiguous and array.flags.aligned


def copied(array: Any) -> Any:  # noqa: ANN401 - an Array, or a DeviceArray
    """A packed copy of an array."""
    if isinstance(array, DeviceArray):
        tensor = array.tensor
        copy = tensor.clone() if tensor.is_contiguous() else tensor.contiguous()
        return DeviceArray(copy, array.dtype)
    return np.array(array, order="C")


def overlap(sources: Sequence[Any], targets: Sequence[Any]) -> bool:
    """Whether any source and any target may share memory."""

    def may_share(one: Any, other: Any) -> bool:  # noqa: ANN401 - as above
        if isinstance(one, DeviceArray) and isinstance(other, DeviceArray):
            storages = [each.tensor.untyped_storage().data_ptr() for each in (one, other)]
            return bool(storages[0] == storages[1])
        return isinstance(one, np.ndarray) and np.may_share_memory(one, other)

    return any(may_share(one, other) for one in sources for other in targets)


def describe(value: object) -> str:
    """An array's dtype and shape, as in ``float32[3, 5]``; for a list, length and first item."""
    if isinstance(value, list | tuple):
        return f"{len(value)} x {describe(value[0])}" if value else "an empty list"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if isinstance(value, np.ndarray):
        dtype = dtype_name(value)
    if dtype is None or shape is None:
        return _type_name(value)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _from_other(value: object, operation: str, writes: bool) -> Array:
    if not is_tensor(value):
        raise InvalidTypeError(
            f"{operation} takes a numpy.ndarray or a torch.Tensor, not {_type_name(value)}"
        )
    tensor: Any = value
    if str(tensor.layout) != "torch.strided":
        raise InvalidTypeError(
            f"{operation} takes dense tensors, not {tensor.layout}; convert it with .to_dense()"
        )
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        if writes:
            raise InvalidTypeError(
                f"{operation} cannot write into a conjugated or negated view; pass a clone"
            )
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu":
        return cast(Array, DeviceArray(tensor, _dtype_of(tensor, operation)))
    return _view(tensor, operation)


def _view(tensor: Any, operation: str) -> Array:  # noqa: ANN401
    dtype = _dtype_of(tensor, operation)
    if tensor.numel() == 0:  # it may have no memory
        return np.empty(tuple(tensor.shape), dtype)
    if tensor.data_ptr() == 0:
        raise InvalidTypeError(
            f"{operation} cannot take {describe(tensor)}, which has no memory of its own: it was "
            "freed, is a fake tensor, or wraps another tensor as DTensor does (pass to_local())"
        )
    # torch's own numpy() would permanently prevent resizing the tensor's memory, which FSDP does
    # with its parameters. This object keeps the memory alive.
    layout = {
        "version": 3,
        "data": (tensor.data_ptr(), False),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * dtype.itemsize for stride in tensor.stride()),
        "typestr": dtype.str,
    }
    array: Array = np.asarray(SimpleNamespace(tensor=tensor, __array_interface__=layout))
    return array.view(dtype) if dtype is _BFLOAT16 else array


def _dtype_of(tensor: Any, operation: str) -> np.dtype[Any]:  # noqa: ANN401 - of torch
    name = str(tensor.dtype).removeprefix("torch.")
    dtype = _BFLOAT16 if name == "bfloat16" else _DTYPES.get(name)
    if dtype is None:
        raise InvalidTypeError(f"{operation} cannot take a tensor of {tensor.dtype}")
    return dtype


def is_tensor(value: object) -> bool:
    """Whether a value is a torch.Tensor (or Parameter), without importing torch."""
    return any(
        kind.__name__ == "Tensor" and kind.__module__ in ("torch", "torch._tensor")
        for kind in type(value).__mro__
    )


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _length(array: Array) -> int:
    return array.shape[0] if array.ndim else 1


def empty(shape: SupportsIndex | Sequence[SupportsIndex], dtype: DTypeLike = float) -> Array:
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
        from rallypoint.base.refusals import refused  # only then

        raise OutOfMemoryError(
            f"empty: the system could not provide {nbytes} bytes of shared memory for an array of "
            f"shape {lengths}: {refused('mmap', errno.ENOMEM)}"
        )
    return block.view(items).reshape(lengths)
