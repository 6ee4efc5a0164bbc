"""What the tools of PyTorch see of calls: the dispatcher, the profiler and torch.compile.

    dist.all_reduce ----> group.allreduce ------------------------------> engine
                              |                                              ^
                              |  a profiler, a dispatch mode, a hook, ...    |
                              +--> c10d::allreduce_ --> backend.allreduce ---+

The direct way takes 4 us, the other one twice as long, because it passes torch's dispatcher, where
tools observe. The checks here are the only cost of the choice.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from rallypoint.process_group.groups.group import ProcessGroup

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(kind: Kind) -> Kind:
    """Have the compiler skip all functions of a class, and all that they call.

    They run in the middle of compiled code. Nothing in them can be compiled, but the official way
    to say so imports the compiler, which would cost every job without torch.compile a second or
    two.
    """
    for member in vars(kind).values():
        if isinstance(member, types.FunctionType):
            _skip(member)
    return kind


def untraced_function(function: Function) -> Function:
    """Have the compiler skip a function, also as a part of one that it compiles."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(function)
    return function


def _skip(function: Any) -> None:  # noqa: ANN401 - it has __code__
    compiler: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if not hasattr(compiler, "set_code_exec_strategy"):
        return  # in this version of PyTorch, torch.compile is slower, or fails
    skip = compiler._FrameAction.SKIP
    compiler.set_code_exec_strategy(function.__code__, compiler._FrameExecStrategy(skip, skip))


_is_profiled = torch._C._autograd._profiler_enabled
_Event = torch._C._profiler._RecordFunctionFast
_NAMES = {  # names of functions that differ from those of the methods
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "recv_anysource": "recv",
}


def recorded(group: ProcessGroup, name: str, given: Sequence[Any], call: Callable[[], Any]) -> Any:  # noqa: ANN401
    """Call `call` and return its result, recorded as an event if a profiler runs.

    It is called `rallypoint:all_reduce` or the like, with sizes and group. The names of the details
    are those of torch's own `record_param_comms`, which trace readers know.

    Args:
        name: the name of the method that was called.
        given: its arguments: outputs and inputs, or the tensors that are both.
    """
    if not _is_profiled():
        return call()
    name = _NAMES.get(name, name)
    outputs = list(_tensors(given[:1]))
    inputs = list(_tensors(given[1:2])) or outputs
    details = {
        "Collective name": name,
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "In msg size": sum(tensor.numel() * tensor.element_size() for tensor in inputs),
        "Out msg size": sum(tensor.numel() * tensor.element_size() for tensor in outputs),
        "Group size": group.size(),
        "Process Group Name": group.group_name,
        "Process Group Ranks": str(list(group.ranks)),
    }
    with _Event(f"rallypoint:{name}", [*inputs, *outputs], details):
        return call()


def _tensors(given: Iterable[Any]) -> Iterator[Any]:
    for each in given:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


Method = TypeVar("Method", bound=Callable[..., Any])

_has_modes = torch._C._len_torch_dispatch_stack
_has_profiler = torch._C._autograd._profiler_enabled


def routed(method: Method) -> Method:
    """Make a method whose first argument contains tensors take the detour where necessary.

    Its class has an attribute `is_watched`, and `detour(method, given, named)`.
    """

    @functools.wraps(method)
    def call(self: Any, tensors: Any, *others: Any, **named: Any) -> Any:  # noqa: ANN401
        if (
            self.is_watched
            or _has_modes()
            or _has_profiler()
            or kind_elsewhere(tensors, others) is not None
        ):
            return self.detour(method, (tensors, *others), named)
        return method(self, tensors, *others, **named)

    return call  # type: ignore[return-value]


def routed_alone(method: Method) -> Method:
    """The same for a method that takes no tensors except in its options."""

    @functools.wraps(method)
    def call(self: Any, opts: Any = None) -> Any:  # noqa: ANN401
        if self.is_watched or _has_modes() or _has_profiler():
            return self.detour(method, () if opts is None else (opts,), {})
        return method(self, opts)

    return call  # type: ignore[return-value]


def kind_given(given: Sequence[Any]) -> str | None:
    """The kind of device of the tensors among a call's arguments, unless it is the CPU."""
    if not given or not isinstance(given[0], list | torch.Tensor):
        return None
    return kind_elsewhere(given[0], given[1:])


def kind_elsewhere(tensors: Any, others: Sequence[Any]) -> str | None:  # noqa: ANN401
    """The kind of device of a call's tensors, unless it is the CPU."""
    first = tensors
    while type(first) is list:
        # On all ranks except the root, scatter and gather have only one of their two lists.
        if not first:
            return kind_elsewhere(others[0], ()) if others and type(others[0]) is list else None
        first = first[0]
    return None if first.is_cpu else str(first.device.type)


class _Handed(threading.local):
    """Thread-local: the work of the last call that reached a backend, for the calling group.

    torch returns its own Work around it, which offers little more than `wait`.
    """

    work: Any = None


_handed = _Handed()


def hand(work: Any) -> Any:  # noqa: ANN401 - a Work
    """Called by a backend with the work that it returns."""
    _handed.work = work
    return work


def handed(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - a Work
    """The work that a call by way of torch began, as the backend returned it.

    If it did not reach the backend, a dispatch mode or another backend took the call: then what
    these returned.
    """
    _handed.work = None
    try:
        result = call()
        return result if _handed.work is None else _handed.work
    finally:
        _handed.work = None
