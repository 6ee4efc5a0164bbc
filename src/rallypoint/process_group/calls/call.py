"""One call of a collective: arguments to memory, memory to the engine, results to the arguments.

Calls of the usual form go straight to the engine (short_way.py), and reach `run` only if it cannot
take their arrays. `base.collective` says what a collective does with its blocks; this module only
lays them out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.base.errors import CallerError, InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import BAD_OPERATOR, DTYPES, ReduceOp
from rallypoint.process_group.delegated import library_calls as delegated
from rallypoint.process_group.delegated.library_work import DelegatedWork
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.memory.arrays import Array, DeviceArray, address, describe, dtype_name
from rallypoint.process_group.operators import Operator, code_and_factor
from rallypoint.process_group.work import OneWork
from rallypoint.store.store import seconds_of

# An array of all blocks, one after the other; or an array for each; or None: no block.
Blocks: TypeAlias = Array | Sequence[Array] | None

_ONE = (np.ndarray, DeviceArray)

SMALL_BYTES = 32 << 10  # so small that copying is cheaper than passing arrays one by one


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
    algorithm: str | None = None,
    results: Sequence[Any] | None = None,
    then: Callable[[], None] | None = None,
    kind: type[OneWork] = OneWork,
) -> OneWork | DelegatedWork | None:
    """Run a collective, or start it.

    Args:
        operation: the public function, for messages.
        inputs, outputs: arrays of one dtype, contiguous or not.
        root: a rank in the group.
        uneven: blocks may differ in length, here or on other ranks.
        algorithm: the algorithm to use; the group's choice if None.
        results: the result of the work; the outputs unless given.
        then: called after success, when the outputs are filled in.
        kind: of the work.

    Raises as `collectives.all_reduce`.
    """
    deferred = None if async_op else group.deferred
    given_in, given_out = _listed(inputs), _listed(outputs)
    arrays = [*given_in, *given_out]
    end = group.end_of(arrays[0], operation)
    if end is not None:
        return delegated.run(
            group,
            end,
            collective,
            operation,
            given_in,
            given_out,
            op=op,
            root=root,
            uneven=uneven,
            async_op=async_op,
            timeout=timeout,
            algorithm=algorithm,
            results=results,
            then=then,
        )
    code, factor = code_and_factor(op)
    whole = given_in if len(given_in) >= len(given_out) else given_out
    variant = group.algorithms.variant(algorithm)
    called = CallDetails(
        operation, whole[0] if len(whole) == 1 else list(whole), code, root, variant
    )
    is_even = not uneven and len({array.size for array in whole}) == 1
    if not is_even and given_in and given_out:
        _check_own(_of(given_in, group), _of(given_out, group), operation)
    is_simple = is_even and not async_op and timeout is None and factor is None
    is_simple = is_simple and _is_simple(arrays)
    if is_simple and _done_as_one(group, collective, given_in, given_out, called):
        if then is not None:
            then()
        return None
    staged = [(array, room_of(array)) for array in given_out]
    targets = [room for _, room in staged]
    sources = [packed(array) for array in given_in]
    if not _can_share(group, collective, sources, targets, root):
        sources = [array.copy() for array in sources]
    copied = [(array, room) for array, room in staged if room is not array]

    def finish() -> None:
        for array, room in copied:
            array[...] = room
        if then is not None:
            then()

    submitted = group.communicator.submit(
        collective + variant,
        code,
        root,
        _as_given(inputs, sources),
        _as_given(outputs, targets),
        dtype=DTYPES.index(dtype_name(arrays[0])),
        factor=1.0 if factor is None else factor,
        uneven=uneven,
        timeout_s=-1.0 if timeout is None else seconds_of(timeout),
        waits=not async_op and deferred is None,
    )
    if isinstance(submitted, int):
        raise _refusal(submitted, called, op)
    if async_op or deferred is not None:
        called = called._replace(site=Site.of_caller())
    work = kind(
        submitted,
        group,
        called,
        given_out if results is None else results,
        finish if copied or then is not None else None,
    )
    if async_op:
        return work
    if deferred is None:
        work.wait()
    else:
        deferred.append(work)
    return None


def _done_as_one(
    group: ProcessGroup,
    collective: Collective,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    called: CallDetails,
) -> bool:
    """Run a collective with all blocks adjacent; False if the engine does not take it."""
    source, target = _joined(inputs), _room_for(outputs)
    pair = ([source], [target]) if source is not None and target is not None else ([], [])
    if source is not None and not _can_share(group, collective, *pair, called.root):
        source = source.copy()
    code = group.run(collective + called.variant, called.op, called.root, source, target)
    if code > 0:
        raise called.error(group, code)
    if code == 0 and target is not None:
        _spread(target, outputs)
    return code == 0


def _refusal(code: int, called: CallDetails, op: Operator | None) -> CallerError:
    """The error for a call that the engine did not start."""
    operation, what = called.operation, describe(called.what)
    if code == BAD_OPERATOR:
        name = op.name if isinstance(op, ReduceOp) else op
        return InvalidTypeError(f"{operation}: {name} does not apply to {what}")
    return InvalidArgumentError(f"{operation} cannot take {what}: the sizes do not fit")


def _of(arrays: Sequence[Array], group: ProcessGroup) -> Array:
    """A rank's own block: one of a list for all ranks, or the only one."""
    return arrays[group.own_rank if len(arrays) == group.size() else 0]


def _check_own(source: Array, target: Array, operation: str) -> None:
    """Peers check blocks that they exchange; a block that stays on this rank is checked here."""
    if source.size != target.size:
        raise InvalidArgumentError(
            f"{operation}: {describe(source)} is sent to this rank itself, but {describe(target)} "
            "receives it; their sizes must be equal"
        )


def _is_simple(arrays: Sequence[Array]) -> bool:
    """Whether arrays need no conversion, and are few, or small enough to be joined."""
    if dtype_name(arrays[0]) == "bfloat16":
        return False
    return len(arrays) <= 2 or sum(array.nbytes for array in arrays) <= SMALL_BYTES


def _joined(arrays: Sequence[Array]) -> Array | None:
    """The items of all arrays one after the other; a single packed array itself."""
    if len(arrays) == 1:
        return packed(arrays[0])
    return np.concatenate([array.reshape(-1) for array in arrays]) if arrays else None


def _room_for(arrays: Sequence[Array]) -> Array | None:
    if len(arrays) == 1:
        return room_of(arrays[0])
    return np.empty(sum(array.size for array in arrays), arrays[0].dtype) if arrays else None


def _spread(target: Array, arrays: Sequence[Array]) -> None:
    """Copy the contents of `_room_for(arrays)` into the arrays."""
    if len(arrays) == 1 and target is arrays[0]:
        return
    start = 0
    for array in arrays:
        array[...] = target.reshape(-1)[start : start + array.size].reshape(array.shape)
        start += array.size


def _listed(blocks: Blocks) -> Sequence[Array]:
    return () if blocks is None else [blocks] if isinstance(blocks, _ONE) else blocks


def _as_given(blocks: Blocks, arrays: list[Array]) -> Array | list[Array] | None:
    return None if blocks is None else arrays[0] if isinstance(blocks, _ONE) else arrays


def packed(array: Array) -> Array:
    """The same items in memory that the engine can take; the array itself if it already is."""
    return array if _is_packed(array) else np.array(array, order="C")


def room_of(array: Array) -> Array:
    """Engine memory for an array's items; the array itself if its memory qualifies."""
    return array if _is_packed(array) else np.empty(array.shape, array.dtype)


def _is_packed(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def _can_share(
    group: ProcessGroup,
    collective: Collective,
    sources: Sequence[Array],
    targets: Sequence[Array],
    root: int,
) -> bool:
    """Whether the engine can take this memory: buffers apart, or one block within another."""
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
    """The address of a block."""
    if len(arrays) == blocks:
        return address(arrays[place])
    return address(arrays[0]) + place * (arrays[0].nbytes // blocks)
