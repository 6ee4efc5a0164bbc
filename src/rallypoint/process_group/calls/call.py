"""How a call reaches the engine: without Python code in its usual form, and otherwise by `run`.

A call of a few bytes takes half a microsecond, most of which would be spent on examining its
arguments here. So a function with `short_way` lets native/python/short_way.cc take the calls whose
arrays the engine can use as they are. The function itself serves every other form, and raises the
errors of wrong arguments; `run` lays out blocks as `base.collective` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from enum import IntEnum
from functools import update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from rallypoint import _native
from rallypoint.base.collective import Collective
from rallypoint.base.errors import (
    CallerError,
    InvalidArgumentError,
    InvalidTypeError,
    RallypointError,
)
from rallypoint.engine.communicator import BAD_OPERATOR, DTYPES, ReduceOp
from rallypoint.process_group.arrays import (
    Array,
    Blocks,
    DeviceArray,
    address,
    describe,
    dtype_name,
    is_packed,
    overlap,
    packed,
)
from rallypoint.process_group.groups import default
from rallypoint.process_group.groups.call_errors import CallDetails, Site
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.operators import Operator, code_and_factor
from rallypoint.process_group.work import CollectiveCall, OneWork
from rallypoint.store.store import seconds_of

if TYPE_CHECKING:
    from rallypoint.process_group.delegated.library_calls import DelegatedWork

_ONE = (np.ndarray, DeviceArray)

SMALL_BYTES = 32 << 10  # so small that copying is cheaper than passing arrays one by one


def run(group: ProcessGroup, call: CollectiveCall) -> OneWork | DelegatedWork | None:
    """Run a collective, or start it; raises as `collectives.all_reduce`."""
    inputs, outputs = _listed(call.inputs), _listed(call.outputs)
    library = group.end_of((inputs or outputs)[0], call.operation)
    work: OneWork | DelegatedWork | None
    if library is None:
        work = _begin(group, call, inputs, outputs)
    else:
        from rallypoint.process_group.delegated import library_calls  # few groups have a library

        work = library_calls.begin(group, library, call, inputs, outputs)
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


def room_of(array: Array) -> Array:
    """Engine memory for an array's items; the array itself if its memory qualifies."""
    return array if is_packed(array) else np.empty(array.shape, array.dtype)


def _can_share(
    group: ProcessGroup,
    collective: Collective,
    sources: Sequence[Array],
    targets: Sequence[Array],
    root: int,
) -> bool:
    """Whether the engine can take this memory: buffers apart, or one block within another."""
    if not sources or not targets or not overlap(sources, targets):
        return True
    is_root = group.own_rank == root
    alias = collective.alias(group.own_rank, is_root=is_root)
    if alias is None:
        return False
    source = _block(sources, alias[0], collective.input_blocks(group.size(), is_root=is_root))
    target = _block(targets, alias[1], collective.output_blocks(group.size(), is_root=is_root))
    if source != target:
        return False
    if len(sources) == len(targets) == 1:
        return True
    return not overlap(
        [array for array in sources if len(sources) == 1 or address(array) != source],
        [array for array in targets if len(targets) == 1 or address(array) != target],
    )


def _block(arrays: Sequence[Array], index: int, blocks: int) -> int:
    """The address of a block."""
    if len(arrays) == blocks:
        return address(arrays[index])
    return address(arrays[0]) + index * (arrays[0].nbytes // blocks)


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Form(IntEnum):
    """What a call does with its arrays; as in native/python/short_call.h."""

    IN_PLACE = 0  # one array is input and output
    ONTO_ROOT = 1  # the same, but only the root has an output
    APART = 2  # an input and an output; if there is a root, only it has the one that is a list
    CUT = 3  # an input and an output, and the input is cut along its first dimension
    NOTHING = 4  # no arrays
    SEND = 5
    RECEIVE = 6


# Roles of parameters, with the numbers of the native core; 0 for all others.
_SOURCE, _TARGET, _SOURCES, _TARGETS = 1, 2, 3, 4
_ROLES = {
    "dst": 5,
    "src": 5,
    "group_dst": 6,
    "group_src": 6,
    "group": 7,
    "op": 8,
    "async_op": 9,
    "algorithm": 10,
    "tag": 11,
    "timeout": 12,
    "input_split_sizes": 13,
    "output_split_sizes": 14,
}


def short_way(
    collective: Collective,
    form: Form,
    *,
    source: str = "",
    target: str = "",
    default_root: int | None = None,
) -> Callable[[_Function], _Function]:
    """Give a function the short way.

    Args:
        source, target: the parameters that are its input and output: a list of arrays, one for
            each rank, if the name ends with ``_list``. One that is both is `source`.
        default_root: the root if none is given.
    """

    def decorate(function: _Function) -> _Function:
        code = cast(FunctionType, function).__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        roles = {
            source: _SOURCES if source.endswith("_list") else _SOURCE,
            target: _TARGETS if target.endswith("_list") else _TARGET,
            **_ROLES,
        }
        has_root = not {"src", "dst"}.isdisjoint(names)
        way = _native.ShortWay(
            function,
            names,
            code.co_argcount,
            tuple(roles.get(name, 0) for name in names),
            collective,
            form,
            default_root,
            has_root and default_root is None and form is not Form.RECEIVE,
        )
        return cast(_Function, update_wrapper(cast(Any, way), function))

    return decorate


def _error(
    group: ProcessGroup, code: int, operation: str, what: object, op: int, root: int, variant: int
) -> RallypointError:
    return CallDetails(operation, what, op, root, variant).error(group, code)


def _begun(
    native: _native.Work,
    group: ProcessGroup,
    operation: str,
    what: object,
    filled: object,
    op: int,
    root: int,
    variant: int,
) -> OneWork:
    # As CallDetails(...), without the time of a call.
    called = tuple.__new__(CallDetails, (operation, what, op, root, variant, Site.of_caller(2)))
    return OneWork(native, group, called, (filled,))


_native.know(np.ndarray, ProcessGroup, ReduceOp, timedelta, vars(default), _error, _begun)
