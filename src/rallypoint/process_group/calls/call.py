"""One call of a collective: arguments to memory, memory to the engine, results to the arguments.

Calls of the usual form go straight to the engine (short_way.py), and reach `run` only if it cannot
take their arrays. `base.collective` says what a collective does with its blocks; this module only
lays them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rallypoint.base.collective import Collective
from rallypoint.base.errors import CallerError, InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import BAD_OPERATOR, DTYPES, ReduceOp
from rallypoint.process_group.delegated import library_calls
from rallypoint.process_group.delegated.library_calls import DelegatedWork
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.memory.arrays import (
    Array,
    Blocks,
    DeviceArray,
    address,
    describe,
    dtype_name,
)
from rallypoint.process_group.operators import Operator, code_and_factor
from rallypoint.process_group.work import CollectiveCall, OneWork
from rallypoint.store.store import seconds_of

_ONE = (np.ndarray, DeviceArray)

SMALL_BYTES = 32 << 10  # so small that copying is cheaper than passing arrays one by one


def run(group: ProcessGroup, call: CollectiveCall) -> OneWork | DelegatedWork | None:
    """Run a collective, or start it; raises as `collectives.all_reduce`."""
    inputs, outputs = _listed(call.inputs), _listed(call.outputs)
    end = group.end_of((inputs or outputs)[0], call.operation)
    work: OneWork | DelegatedWork | None
    if end is None:
        work = _begin(group, call, inputs, outputs)
    else:
        work = library_calls.begin(group, end, call, inputs, outputs)
    if work is None or call.async_op:
        return work
    if group.deferred is None:
        work.wait()
    else:
        group.deferred.append(work)
    return None


def _begin(
    group: ProcessGroup, call: CollectiveCall, inputs: Sequence[Array], outputs: Sequence[Array]
) -> OneWork | None:
    """Start a collective at the engine; None if it is done."""
    timeout, then = call.timeout, call.then
    arrays = [*inputs, *outputs]
    code, factor = code_and_factor(call.op)
    whole = inputs if len(inputs) >= len(outputs) else outputs
    variant = group.algorithms.variant(call.algorithm)
    is_even = not call.uneven and (len(whole) == 1 or len({array.size for array in whole}) == 1)
    if not is_even and inputs and outputs:
        _check_own(_of(inputs, group), _of(outputs, group), call.operation)

    def details(site: Site | None = None) -> CallDetails:
        what = whole[0] if len(whole) == 1 else list(whole)
        return CallDetails(call.operation, what, code, call.root, variant, site)

    if is_even and not call.async_op and timeout is None and factor is None and _is_simple(arrays):
        result = _run_as_one(group, call, variant, code, inputs, outputs)
        if result > 0:
            raise details().error(group, result)
        if result == 0:
            if then is not None:
                then()
            return None
    staged = [(array, room_of(array)) for array in outputs]
    targets = [room for _, room in staged]
    sources = [packed(array) for array in inputs]
    if not _can_share(group, call.collective, sources, targets, call.root):
        sources = [array.copy() for array in sources]
    copied = [(array, room) for array, room in staged if room is not array]

    def finish() -> None:
        for array, room in copied:
            array[...] = room
        if then is not None:
            then()

    waits = not call.async_op and group.deferred is None
    submitted = group.communicator.submit(
        call.collective + variant,
        code,
        call.root,
        _as_given(call.inputs, sources),
        _as_given(call.outputs, targets),
        dtype=DTYPES.index(dtype_name(arrays[0])),
        factor=1.0 if factor is None else factor,
        uneven=call.uneven,
        timeout_s=-1.0 if timeout is None else seconds_of(timeout),
        waits=waits,
    )
    if isinstance(submitted, int):
        raise _refusal(submitted, details(), call.op)
    return call.work_type(
        submitted,
        group,
        details(None if waits else Site.of_caller()),
        outputs if call.results is None else call.results,
        finish if copied or then is not None else None,
    )


def _run_as_one(
    group: ProcessGroup,
    call: CollectiveCall,
    variant: int,
    code: int,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
) -> int:
    """Run a collective with all blocks adjacent; returns the engine's result."""
    source, target = _joined(inputs), _room_for(outputs)
    pair = ([source], [target]) if source is not None and target is not None else ([], [])
    if source is not None and not _can_share(group, call.collective, *pair, call.root):
        source = source.copy()
    result = group.run(call.collective + variant, code, call.root, source, target)
    if result == 0 and target is not None:
        _spread(target, outputs)
    return result


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
