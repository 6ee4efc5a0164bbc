"""One call of a collective: arguments to memory, memory to the engine, results to the arguments.

The common call, of one contiguous array, does not come here: it goes straight to the engine and
comes here only if the engine cannot take its buffers. What a collective does with its blocks is
`schedule.collective`; here they are only laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TypeAlias

import numpy as np

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import BAD_OPERATOR, DTYPES, ReduceOp
from rallypoint.process_group.accounts import Site
from rallypoint.process_group.arrays import Array, address, describe, dtype_name
from rallypoint.process_group.groups import ProcessGroup
from rallypoint.process_group.operators import Operator, code_and_factor
from rallypoint.process_group.work import Called, OneWork, Work
from rallypoint.schedule.collective import Collective
from rallypoint.store.store import seconds_of

# An array of all blocks, one after the other; or an array for each; or None: no block.
Blocks: TypeAlias = Array | Sequence[Array] | None


def run(
    group: ProcessGroup,
    collective: Collective,
    operation: str,
    inputs: Blocks,
    outputs: Blocks,
    *,
    op: Operator | None = None,
    root: int = 0,
    uneven: bool = False,
    async_op: bool = False,
    timeout: timedelta | None = None,
) -> Work | None:
    """Run a collective, or begin it.

    Args:
        operation: the public function, for messages.
        inputs, outputs: arrays of one dtype, contiguous or not.
        root: a rank in the group.
        uneven: blocks may differ in length, here or elsewhere.

    Raises as `collectives.all_reduce`.
    """
    given_in, given_out = _listed(inputs), _listed(outputs)
    code, factor = code_and_factor(op)
    staged = [(array, _room(array)) for array in given_out]
    targets = [room for _, room in staged]
    sources = [_packed(array) for array in given_in]
    if not _can_share(group, collective, sources, targets, root):
        sources = [array.copy() for array in sources]
    copied = [(array, room) for array, room in staged if room is not array]

    def finish() -> None:
        for array, room in copied:
            array[...] = room

    arrays = [*given_in, *given_out]
    submitted = group.communicator.submit(
        collective,
        code,
        root,
        _as_given(inputs, sources),
        _as_given(outputs, targets),
        dtype=DTYPES.index(dtype_name(arrays[0])) if arrays else -1,
        factor=factor,
        uneven=uneven,
        timeout_s=-1.0 if timeout is None else seconds_of(timeout),
        finish=finish if copied else None,
    )
    whole = given_in if len(given_in) >= len(given_out) else given_out
    what = describe(whole[0] if len(whole) == 1 else whole)
    if submitted == BAD_OPERATOR:
        name = op.name if isinstance(op, ReduceOp) else op
        raise InvalidTypeError(f"{operation}: {name} does not apply to {what}")
    if isinstance(submitted, int):
        raise InvalidArgumentError(f"{operation} cannot take {what}: the sizes do not fit")
    site = Site.of_caller() if async_op else None
    work = OneWork(submitted, group, Called(operation, what, code, root, site), given_out)
    if async_op:
        return work
    work.wait()
    return None


def _listed(blocks: Blocks) -> Sequence[Array]:
    return () if blocks is None else [blocks] if isinstance(blocks, np.ndarray) else blocks


def _as_given(blocks: Blocks, arrays: list[Array]) -> Array | list[Array] | None:
    return None if blocks is None else arrays[0] if isinstance(blocks, np.ndarray) else arrays


def _packed(array: Array) -> Array:
    return array if array.flags.c_contiguous else np.array(array, order="C")


def _room(array: Array) -> Array:
    return array if array.flags.c_contiguous else np.empty(array.shape, array.dtype)


def _can_share(
    group: ProcessGroup,
    collective: Collective,
    sources: Sequence[Array],
    targets: Sequence[Array],
    root: int,
) -> bool:
    """Whether the engine can take this memory: apart, or one block in place of another."""
    if not sources or not targets or not _overlap(sources, targets):
        return True
    is_root = group.own_rank == root
    alias = collective.alias(group.own_rank, is_root=is_root)
    if alias is None:
        return False
    source = _block(sources, alias[0], collective.input_blocks(group.size(), is_root=is_root))
    target = _block(targets, alias[1], collective.output_blocks(group.size(), is_root=is_root))
    if source != target:
        return False
    apart_in = [array for array in sources if len(sources) == 1 or address(array) != source]
    apart_out = [array for array in targets if len(targets) == 1 or address(array) != target]
    if len(sources) == len(targets) == 1:
        return True
    return not _overlap(
        apart_in if len(sources) > 1 else sources, apart_out if len(targets) > 1 else targets
    )


def _overlap(sources: Sequence[Array], targets: Sequence[Array]) -> bool:
    return any(np.may_share_memory(one, other) for one in sources for other in targets)


def _block(arrays: Sequence[Array], place: int, blocks: int) -> int:
    """Where a block begins."""
    if len(arrays) == blocks:
        return address(arrays[place])
    return address(arrays[0]) + place * (arrays[0].nbytes // blocks)
