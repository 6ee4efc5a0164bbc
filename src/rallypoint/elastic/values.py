"""A state's values as an outline and arrays of bytes, and back.

An outline has everything but the arrays and tensors, in whose places it has `ARRAY`. It is pickled:
it only travels between ranks of one job, which run the same program. What has `state_dict` and
`load_state_dict` (models, optimizers, schedulers) is seen by those; so are random generators, by
their states. PyTorch is used only if the program has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
import numpy.typing


class UpdateParticipant:
    """A value that takes part in the updates of the State that holds it.

    A step may change its memory before the step's update: gradients, or the statistics of a
    BatchNorm. The names are those of a two-phase commit.
    """

    def prepare(self) -> None:
        """Make ready for an update, before the ranks agree on it; it may communicate.

        Raises:
            PeerLostError: a rank was lost.
        """

    def commit(self) -> None:
        """The ranks are of one state: they have made an update, or brought a newcomer up to date.

        It must not communicate.
        """

    def rollback(self) -> None:
        """Undo what has happened since the last `commit`: ranks were lost or have joined.

        It must not communicate.
        """


Bytes = numpy.typing.NDArray[numpy.uint8]
_BYTE = numpy.dtype(numpy.uint8)  # as an object, it saves a third of a `view`


class _Mark(Enum):
    ARRAY = "an array"


ARRAY = _Mark.ARRAY


class Outline(NamedTuple):
    """A value without its arrays.

    Attributes:
        tree: the value, or the state of an object, with marks in place of its arrays.
        size: how many there are.
    """

    tree: Any
    size: int


class Spec(NamedTuple):
    """What an array is: of which library, of which type and shape.

    Attributes:
        whole: of a DTensor, whose part this is: its shape, its strides and its placements.
    """

    library: str
    dtype: str
    shape: tuple[int, ...]
    whole: tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]] | None = None

    def __str__(self) -> str:
        dtype = numpy.dtype(self.dtype).name if self.library == "numpy" else self.dtype
        return f"{dtype} of shape {self.shape}"


class Leaf(NamedTuple):
    """The bytes of an array or a tensor.

    Attributes:
        data: what is received there becomes its contents when `store` has been called.
    """

    data: Bytes
    store: Callable[[], object]


def _nothing() -> None:
    """The bytes are the array's own."""


def _torch() -> Any:
    return sys.modules.get("torch")


def is_array(value: object) -> bool:
    """Whether it is an array of numbers or a tensor; what holds Python's objects is pickled."""
    if isinstance(value, numpy.ndarray):
        return not value.dtype.hasobject
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_model(value: object) -> bool:
    """Whether its state is the same arrays for life."""
    torch = _torch()
    return isinstance(value, UpdateParticipant) or (
        torch is not None and isinstance(value, torch.nn.Module)
    )


def spec_of(value: Any) -> Spec:
    """What an array is, or a tensor."""
    if isinstance(value, numpy.ndarray):
        return _numpy_spec(value.dtype, value.shape)
    tensor = _own_part(value)
    dtype = str(tensor.dtype).removeprefix("torch.")
    spec = Spec("torch", dtype, tuple(tensor.shape))
    if tensor is value or not hasattr(value, "placements"):
        return spec
    return spec._replace(whole=(tuple(value.shape), tuple(value.stride()), tuple(value.placements)))


@lru_cache(maxsize=4096)  # a state has thousands of arrays, of few kinds
def _numpy_spec(dtype: numpy.dtype[Any], shape: tuple[int, ...]) -> Spec:
    return Spec("numpy", dtype.str, shape)


def _own_part(value: object) -> Any:
    """A tensor, or this rank's part of a DTensor."""
    return getattr(value, "_local_tensor", value)


def leaf_of(value: object, *, is_room: bool = False) -> Leaf:
    """The bytes of an array, or of a tensor on any device.

    Args:
        is_room: they are to be received, and may be anything before.
    """
    if isinstance(value, numpy.ndarray):
        if value.flags.c_contiguous:
            return Leaf(value.ravel().view(_BYTE), _nothing)
        whole = numpy.ascontiguousarray(value)
        return Leaf(whole.ravel().view(_BYTE), lambda: _copy(value, whole))
    tensor = _own_part(value).detach()
    if tensor.is_cpu and tensor.is_contiguous():
        return Leaf(_bytes_of(tensor), _nothing)
    if is_room:
        here = _torch().empty(tensor.shape, dtype=tensor.dtype)
    else:
        here = tensor.cpu().contiguous()
    return Leaf(_bytes_of(here), lambda: tensor.copy_(here))


def _bytes_of(tensor: Any) -> Bytes:
    return tensor.reshape(-1).view(_torch().uint8).numpy()  # type: ignore[no-any-return]


def _copy(array: Any, whole: Any) -> None:
    array[...] = whole


def empty(spec: Spec, mesh: object = None) -> Any:
    """A new array; of a DTensor, this rank's part on that mesh."""
    if spec.library == "numpy":
        return numpy.empty(spec.shape, spec.dtype)
    torch = _torch()
    part = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    if spec.whole is None:
        return part
    shape, strides, placements = spec.whole
    kind = sys.modules["torch.distributed.tensor"].DTensor
    size = torch.Size(shape)
    return kind.from_local(part, mesh, placements, run_check=False, shape=size, stride=strides)


def mesh_of(arrays: Sequence[object]) -> object:
    """The mesh of the DTensors among them."""
    return next((each.device_mesh for each in arrays if hasattr(each, "device_mesh")), None)


def _is_stateful(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def _is_generator(value: object) -> bool:
    """Of NumPy, which loads that module only for programs that use it: it takes 6 ms."""
    random = sys.modules.get("numpy.random")
    return random is not None and isinstance(value, random.Generator)


def read(value: Any) -> Any:
    """The value, or the state of an object that has one, as a tree."""
    if _is_generator(value):
        return value.bit_generator.state
    torch = _torch()
    if torch is not None and isinstance(value, torch.Generator):
        return value.get_state()
    return value.state_dict() if _is_stateful(value) else value


def write(value: Any, tree: Any) -> Any:
    """Give a value what `read` returned elsewhere; returns the value, which may be a new one."""
    torch = _torch()
    if _is_generator(value):
        value.bit_generator.state = tree
    elif torch is not None and isinstance(value, torch.Generator):
        value.set_state(tree)
    elif _is_stateful(value):
        value.load_state_dict(tree)
    else:
        return tree
    return value


def mapped(tree: object, is_leaf: Callable[[object], bool], change: Callable[[Any], object]) -> Any:
    """The tree of dicts, lists and tuples with its leaves changed."""

    def of(each: Any) -> object:
        if is_leaf(each):
            return change(each)
        kind = type(each)
        if kind is list:
            return [of(one) for one in each]
        if kind is tuple:
            return tuple([of(one) for one in each])
        if isinstance(each, dict):
            copy = {key: of(one) for key, one in each.items()}
            return copy if kind is dict else _like(each, copy)
        return each

    return of(tree)


def _like(tree: Any, copy: dict[object, object]) -> object:
    try:
        return type(tree)(copy)  # an OrderedDict, a defaultdict without its function
    except TypeError:
        return copy


def outline(tree: object, arrays: list[Any]) -> Outline:
    """The tree without its arrays, which are appended."""
    before = len(arrays)

    def take(array: object) -> _Mark:
        arrays.append(array)
        return ARRAY

    return Outline(mapped(tree, is_array, take), len(arrays) - before)


def _is_mark(value: object) -> bool:
    return value is ARRAY


def fill(tree: object, arrays: Iterator[object]) -> Any:
    """The tree of an outline with these arrays."""
    return mapped(tree, _is_mark, lambda _: next(arrays))


def count_arrays(tree: object) -> int:
    """How many arrays a part of an outline's tree has."""
    found: list[object] = []
    mapped(tree, _is_mark, found.append)
    return len(found)


def copied(tree: object) -> Any:
    """A copy that later changes do not touch."""
    import copy

    arrays: list[Any] = []
    drawn = copy.deepcopy(outline(tree, arrays))
    kept = (each.copy() if _is_numpy(each) else each.detach().clone() for each in arrays)
    return fill(drawn.tree, kept)


def _is_numpy(value: object) -> bool:
    return isinstance(value, numpy.ndarray)


def restore(value: Any, tree: object) -> Any:
    """As `write`, but the tree stays a copy, and arrays keep their memory if they are alike."""
    import copy

    own: list[Any] = []
    kept: list[Any] = []
    outline(read(value), own)
    drawn = copy.deepcopy(outline(tree, kept))
    if list(map(spec_of, own)) != list(map(spec_of, kept)):
        return write(value, copied(tree))
    for array, source in zip(own, kept, strict=True):
        if _is_numpy(array):
            _copy(array, source)
        else:
            array.detach().copy_(source.detach())
    return write(value, fill(drawn.tree, iter(own)))
