"""One call of a collective: arguments to memory, memory to the engine, results to the arguments.

The common call, of one contiguous NumPy array, does not come here: it goes straight to the engine
and comes here only if the engine cannot take its buffers. What a collective does with its blocks is
`schedule.collective`; here they are only laid out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.engine.communicator import ReduceOp
from rallypoint.process_group.accounts import failure
from rallypoint.process_group.arrays import Array, describe, flat, room_for, spread
from rallypoint.process_group.groups import ProcessGroup
from rallypoint.schedule.collective import Collective

_BITWISE = ("BAND", "BOR", "BXOR")


def check_operator(op: object, array: Array, operation: str) -> ReduceOp:
    """An operator that can combine the items of an array.

    Raises:
        InvalidArgumentError: it is none, or does not apply to such items.
    """
    if type(op) is not ReduceOp:
        raise InvalidArgumentError(
            f"op must be one of ReduceOp.{', ReduceOp.'.join(ReduceOp.__members__)}, not {op!r}"
        )
    kind = array.dtype.kind
    if (op.name in _BITWISE and kind not in "biu") or (
        kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX)
    ):
        raise InvalidArgumentError(f"{operation}: {op.name} does not apply to {array.dtype}")
    return op


def run(
    group: ProcessGroup,
    collective: Collective,
    operation: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    *,
    op: int = 0,
    root: int = 0,
) -> None:
    """Run a collective whose blocks are all of one length.

    Args:
        operation: the public function, for messages.
        inputs, outputs: arrays of one dtype that hold the blocks one after the other; none where
            this rank puts nothing in, or gets nothing out.
        root: a rank in the group.
    """
    dtype = (inputs or outputs)[0].dtype
    source = flat(inputs) if inputs else np.empty(0, dtype)
    target = room_for(outputs) if outputs else np.empty(0, dtype)
    if not _can_share(group, collective, source, target, root):
        source = source.copy()
    code = group.run(collective, op, root, source, target)
    if code != 0:
        what = describe(next(iter([*inputs, *outputs])))
        raise failure(group, code, operation, what, op=op, root=root)
    spread(target, outputs)


def run_uneven(
    group: ProcessGroup,
    collective: Collective,
    operation: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    *,
    largest: int,
    op: int = 0,
) -> None:
    """Run a collective whose blocks differ in length: one array for each block.

    Args:
        largest: the most items of any block of any rank.
    """
    sent = np.zeros((len(inputs), largest), inputs[0].dtype)
    for row, array in zip(sent, inputs, strict=True):
        row[: array.size] = array.reshape(-1)
    received = np.empty((len(outputs), largest), inputs[0].dtype)
    code = group.run(collective, op, 0, sent, received)
    if code != 0:
        raise failure(group, code, operation, describe(list(inputs)), op=op)
    for row, array in zip(received, outputs, strict=True):
        array[...] = row[: array.size].reshape(array.shape)


def _can_share(
    group: ProcessGroup, collective: Collective, source: Array, target: Array, root: int
) -> bool:
    """Whether the engine can take these buffers: apart, or one block in place of another."""
    if source.size == 0 or not np.may_share_memory(source, target):
        return True
    is_root = group.own_rank == root
    alias = collective.alias(group.own_rank, is_root=is_root)
    if alias is None:
        return False
    block = source.nbytes // collective.input_blocks(group.size(), is_root=is_root)
    return source.ctypes.data + alias[0] * block == target.ctypes.data + alias[1] * block


def refuse_async() -> None:
    """Until the engine can."""
    raise InvalidArgumentError("async_op=True is not available yet; call without it")
