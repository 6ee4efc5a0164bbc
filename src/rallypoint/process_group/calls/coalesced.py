"""Several collectives as one call: started one after the other, waited for together.

Names, arguments and semantics are torch.distributed's. Arrays are not packed together: each is a
collective of its own that starts when the previous one is done, without a wait in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.calls.collectives import all_reduce
from rallypoint.process_group.calls.exchanges import all_gather
from rallypoint.process_group.groups.default import Group, joined, resolve
from rallypoint.process_group.memory.arrays import Array
from rallypoint.process_group.operators import Operator
from rallypoint.process_group.work import ManyWorks, Work, ended_on_error, together

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
    """all_reduce of several arrays, or of one.

    Args:
        tensors: one array or a list of them, each combined in place; the same shapes and dtypes on
            every rank.
        op: how items are combined; see all_reduce.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
    """
    if joined(group, "all_reduce_coalesced") is None:
        return None
    works: list[Work | None] = []
    with ended_on_error(works):
        for tensor in tensors if isinstance(tensors, list | tuple) else [tensors]:
            works.append(all_reduce(tensor, op, group, True, timeout=timeout, algorithm=algorithm))
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
        output_tensor_lists: for each rank, a list of arrays with the sizes of that rank's
            `input_tensor_list`; filled in.
        input_tensor_list: equally many arrays on every rank.

    Returns:
        The operation, if `async_op` is true and this rank is in the group; otherwise None.

    Raises:
        InvalidTypeError: an argument is not an array or CPU tensor, or its dtype is not supported,
            or an output is read-only.
        InvalidArgumentError: arrays do not fit each other or the group, or there is no such rank or
            algorithm.
        MismatchError: ranks called different operations, or with different sizes, dtypes or roots.
        ProgramError: your own algorithm is wrong; names the rank, step and chunk at fault.
        PeerLostError: a rank died or left the group.
        CollectiveTimeoutError: a rank did not take part within the timeout.
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
    works: list[Work | None] = []
    with ended_on_error(works):
        for *outputs, array in zip(*output_tensor_lists, input_tensor_list, strict=True):
            works.append(
                all_gather(outputs, array, group, True, timeout=timeout, algorithm=algorithm)
            )
    return together(works, async_op)


@contextmanager
def _coalescing_manager(
    group: Group = None, device: object = None, async_ops: bool = False
) -> Iterator[ManyWorks]:
    """Run the collectives of a group in a ``with`` block side by side.

    Within the block they return at once, and their arrays must not be touched. They are completed
    at the end of the block or, with `async_ops`, when the manager's `wait()` returns. Unlike
    torch's, it accepts any mixture of collectives and operators. `device` is accepted for
    compatibility with torch and ignored.

        with dist._coalescing_manager():
            for array in arrays:
                dist.all_reduce(array)

    Raises:
        InvalidArgumentError: it is nested in another one of the same group.
    """
    chosen = resolve(group)
    if chosen.deferred is not None:
        raise InvalidArgumentError("a _coalescing_manager of this group is already open")
    manager = ManyWorks([])
    chosen.defer(manager.works)
    try:
        yield manager
    finally:
        chosen.deferred = None
        if not chosen.is_destroyed:  # it may be, in the block; then it refuses calls
            chosen.bind_calls()
    if not async_ops:
        manager.wait()
