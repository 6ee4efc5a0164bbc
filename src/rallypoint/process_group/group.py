"""Collectives and point-to-point messages: torch.distributed's names, arguments and semantics.

Here a call becomes (collective, operator, root, buffers); which program runs it, `planning` says,
and how, the engine. Arrays are NumPy arrays; those that are not contiguous are copied in and out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rallypoint.base.errors import (
    InvalidArgumentError,
    InvalidTypeError,
    NotInitializedError,
)
from rallypoint.engine.communicator import (
    BAD_BUFFER,
    BAD_OPERATOR,
    DTYPES,
    Communicator,
    ReduceOp,
)
from rallypoint.schedule.program import Collective

Array = NDArray[Any]

_NOTHING = np.empty(0, np.float32)


class ProcessGroup:
    """A group of ranks that communicate.

    Attributes:
        rank: this process's rank.
        size: the number of ranks.
    """

    def __init__(self, communicator: Communicator, on_destroy: Callable[[], None]) -> None:
        self.rank = communicator.rank
        self.size = communicator.ranks
        self.communicator = communicator
        self.on_destroy = on_destroy


_world: ProcessGroup | None = None


def set_world(group: ProcessGroup | None) -> None:
    """Make a group the default one (init_process_group and destroy_process_group do)."""
    global _world  # noqa: PLW0603 - the default group is process-wide state by definition
    _world = group


def is_initialized() -> bool:
    """Whether there is a default process group."""
    return _world is not None


def resolve(group: ProcessGroup | None) -> ProcessGroup:
    """The group meant by an argument `group`: None is the default one.

    Raises:
        NotInitializedError: there is no default group.
    """
    if group is not None:
        return group
    if _world is None:
        raise NotInitializedError(
            "Default process group has not been initialized, please make sure to call "
            "init_process_group."
        )
    return _world


def get_rank(group: ProcessGroup | None = None) -> int:
    """This process's rank in the group."""
    return resolve(group).rank


def get_world_size(group: ProcessGroup | None = None) -> int:
    """The number of ranks in the group."""
    return resolve(group).size


def all_reduce(
    tensor: Array,
    op: ReduceOp = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Combine the arrays of all ranks element by element, in place, with equal bits on each rank.

    Args:
        tensor: any shape, writable; the same shape and dtype on every rank.
        op: SUM, AVG, PRODUCT, MIN or MAX; BAND, BOR or BXOR for integers and bool.

    Raises:
        InvalidTypeError: not a NumPy array, an unsupported dtype, or read-only.
        MismatchError: ranks called different operations, or with other sizes, dtypes or operators.
        PeerLostError: a rank died or left.
        CollectiveTimeoutError: a rank did not come within the group's timeout.
    """
    chosen = resolve(group)
    _refuse_async(async_op)
    _run(chosen, Collective.ALL_REDUCE, _operator(op), 0, tensor, tensor)


def broadcast(
    tensor: Array, src: int, group: ProcessGroup | None = None, async_op: bool = False
) -> None:
    """Copy the array of rank `src` into the arrays of all ranks; raises as all_reduce."""
    chosen = resolve(group)
    _refuse_async(async_op)
    root = _peer(chosen, src, "src")
    _run(chosen, Collective.BROADCAST, 0, root, tensor, tensor, writes=chosen.rank != root)


def all_gather(
    tensor_list: list[Array],
    tensor: Array,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> None:
    """Collect the arrays of all ranks on every rank; raises as all_reduce.

    Args:
        tensor_list: one array per rank, each of the shape and dtype of `tensor`; filled in.
        tensor: this rank's array; the same shape and dtype on every rank.
    """
    chosen = resolve(group)
    _refuse_async(async_op)
    source = _array(tensor, "all_gather")
    if len(tensor_list) != chosen.size:
        raise InvalidArgumentError(
            f"all_gather: tensor_list has {len(tensor_list)} arrays, but the group has "
            f"{chosen.size} ranks; pass one for each"
        )
    for index, target in enumerate(tensor_list):
        _array(target, "all_gather", writes=True)
        if target.shape != source.shape or target.dtype != source.dtype:
            raise InvalidArgumentError(
                f"all_gather: tensor_list[{index}] is {target.dtype}{list(target.shape)}, but "
                f"tensor is {source.dtype}{list(source.shape)}; they must be alike"
            )
    gathered = np.empty((chosen.size, *source.shape), source.dtype)
    _run(chosen, Collective.ALL_GATHER, 0, 0, np.ascontiguousarray(source), gathered)
    for target, result in zip(tensor_list, gathered, strict=True):
        target[...] = result


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> None:
    """Wait until all ranks have come here; raises as all_reduce."""
    chosen = resolve(group)
    _refuse_async(async_op)
    _run(chosen, Collective.BARRIER, 0, 0, _NOTHING, _NOTHING)


def send(tensor: Array, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send an array to a rank; returns when the array may be changed again.

    Messages to a rank are received in the order in which they were sent.

    Raises:
        InvalidArgumentError: `dst` is this rank or none of the group.
        MismatchError: the receiver expects another size, dtype or tag.
        PeerLostError: the receiver died or left.
    """
    chosen = resolve(group)
    peer = _other(chosen, dst, "dst")
    _run_pair(chosen, chosen.rank, peer, tag, tensor)


def recv(tensor: Array, src: int, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive an array from a rank into `tensor`; returns the sender's rank; raises as send."""
    chosen = resolve(group)
    peer = _other(chosen, src, "src")
    _run_pair(chosen, peer, chosen.rank, tag, tensor)
    return peer


def _run(
    group: ProcessGroup,
    collective: Collective,
    op: int,
    root: int,
    source: Array,
    target: Array,
    *,
    writes: bool = True,
) -> None:
    code = group.communicator.run(collective, op, root, source, target)
    if code == 0:
        return
    name = collective.name.lower()
    if code == BAD_OPERATOR:
        raise InvalidTypeError(f"{name}: {ReduceOp(op).name} does not apply to {source.dtype}")
    if code != BAD_BUFFER:
        raise group.communicator.error(name)
    checked = _array(target, name, writes=writes)
    contiguous = np.array(checked, order="C")  # a copy: the array was strided or read-only
    code = group.communicator.run(collective, op, root, contiguous, contiguous)
    if code != 0:
        raise group.communicator.error(name)
    if writes:
        checked[...] = contiguous


def _run_pair(group: ProcessGroup, source: int, target: int, tag: int, tensor: Array) -> None:
    receives = target == group.rank
    name = "recv" if receives else "send"
    code = _carry(group, source, target, tag, tensor)
    if code == BAD_BUFFER:
        checked = _array(tensor, name, writes=receives)
        contiguous = np.array(checked, order="C")
        code = _carry(group, source, target, tag, contiguous)
        if code >= 0 and receives:
            checked[...] = contiguous
    if code != (source if receives else 0):
        raise group.communicator.error(name)


def _carry(group: ProcessGroup, source: int, target: int, tag: int, tensor: Array) -> int:
    if target == group.rank:
        return group.communicator.receive(source, tag, tensor)
    return group.communicator.send(target, tag, tensor)


def _array(value: object, operation: str, *, writes: bool = False) -> Array:
    """Check that a value is an array which the operation can take."""
    if not isinstance(value, np.ndarray):
        raise InvalidTypeError(
            f"{operation} takes a numpy.ndarray, not {type(value).__module__}."
            f"{type(value).__qualname__}"
        )
    if value.dtype.name not in DTYPES or not value.dtype.isnative:
        raise InvalidTypeError(
            f"{operation} takes arrays of {', '.join(DTYPES)} in native byte order, not "
            f"{value.dtype!r}; convert it with astype()"
        )
    if writes and not value.flags.writeable:
        raise InvalidTypeError(
            f"{operation} writes its result into the array, but this one is read-only; "
            "pass a writable copy"
        )
    return value


def _operator(op: ReduceOp) -> ReduceOp:
    if type(op) is not ReduceOp:
        raise InvalidArgumentError(
            f"op must be one of ReduceOp.{', ReduceOp.'.join(ReduceOp.__members__)}, not {op!r}"
        )
    return op


def _peer(group: ProcessGroup, rank: int, name: str) -> int:
    if not isinstance(rank, int) or not 0 <= rank < group.size:
        raise InvalidArgumentError(
            f"{name}={rank!r} is not a rank of this group; its ranks are 0 to {group.size - 1}"
        )
    return rank


def _other(group: ProcessGroup, rank: int, name: str) -> int:
    if _peer(group, rank, name) == group.rank:
        raise InvalidArgumentError(f"{name}={rank} is this rank itself; name another one")
    return rank


def _refuse_async(async_op: bool) -> None:
    if async_op:
        raise InvalidArgumentError("async_op=True is not available yet; call without it")
