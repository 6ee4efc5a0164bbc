"""Several collectives as one call: begun one after the other, waited for together.

Names, arguments and semantics are torch.distributed's. Arrays are not packed together: each goes
its own way, the next begins when the one before it is done, and nobody waits in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import BAD_BUFFER, ReduceOp
from rallypoint.process_group.calls.collectives import all_reduce
from rallypoint.process_group.calls.exchanges import all_gather
from rallypoint.process_group.groups.default import Group, joined, resolve
from rallypoint.process_group.memory.arrays import Array
from rallypoint.process_group.operators import Operator
from rallypoint.process_group.work import ManyWorks, Work, together

_SUM = ReduceOp.SUM


def all_reduce_coalesced(
    tensors: Sequence[Array] | Array,
    op: Operator = _SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """all_reduce of several arrays, or of one; raises as all_reduce."""
    if joined(group, "all_reduce_coalesced") is None:
        return None
    works = [
        all_reduce(tensor, op, group, True, timeout=timeout, algorithm=algorithm)
        for tensor in (tensors if isinstance(tensors, list | tuple) else [tensors])
    ]
    return together(works, async_op)


def all_gather_coalesced(
    output_tensor_lists: list[list[Array]],
    input_tensor_list: list[Array],
    group: Group = None,
    async_op: bool = False,
    *,
    timeout: timedelta | None = None,
    algorithm: str | None = None,
) -> Work | None:
    """all_gather of several arrays.

    Args:
        output_tensor_lists: for each rank, a list of arrays as large as those that it passes as
            `input_tensor_list`; filled in.
        input_tensor_list: as many arrays on every rank.

    Raises as all_gather.
    """
    name = "all_gather_coalesced"
    chosen = joined(group, name)
    if chosen is None:
        return None
    if not isinstance(output_tensor_lists, list | tuple) or not isinstance(
        input_tensor_list, list | tuple
    ):
        raise InvalidTypeError(
            f"{name}: output_tensor_lists must be a list of lists of arrays, and input_tensor_list "
            "a list of arrays"
        )
    lengths = [len(arrays) for arrays in output_tensor_lists]
    if lengths != [len(input_tensor_list)] * chosen.size():
        raise InvalidArgumentError(
            f"{name}: output_tensor_lists must have {chosen.size()} lists, one for each rank, of "
            f"{len(input_tensor_list)} arrays each, one for each input; it has {lengths}"
        )
    works = [
        all_gather(list(outputs), array, group, True, timeout=timeout, algorithm=algorithm)
        for *outputs, array in zip(*output_tensor_lists, input_tensor_list, strict=True)
    ]
    return together(works, async_op)


class CoalescingManager(ManyWorks):
    """The collectives of a block; with `async_ops`, what to wait for once it is over."""

    def __init__(self) -> None:
        super().__init__([])


@contextmanager
def _coalescing_manager(
    group: Group = None, device: object = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Have the collectives of a group in a ``with`` block go side by side.

    Within the block they return at once, and their arrays must not be touched. At its end they
    are completed; with `async_ops`, they are when the manager's `wait()` returns. Unlike torch's it
    takes all collectives and operators in any mixture. `device` is accepted for torch's sake.

        with dist._coalescing_manager():
            for array in arrays:
                dist.all_reduce(array)

    Raises:
        InvalidArgumentError: it is within another one of the same group.
    """
    chosen = resolve(group)
    if chosen.deferred is not None:
        raise InvalidArgumentError("a _coalescing_manager of this group is already open")
    manager = CoalescingManager()
    run, run_apart = chosen.run, chosen.run_apart
    chosen.deferred = manager.works
    chosen.run = chosen.run_apart = lambda *_: BAD_BUFFER  # so that every call comes to calls.run
    try:
        yield manager
    finally:
        chosen.deferred = None
        if not chosen.is_destroyed:  # in the block; then it refuses calls
            chosen.run, chosen.run_apart = run, run_apart
    if not async_ops:
        manager.wait()
