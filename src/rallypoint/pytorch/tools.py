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
import torch.distributed as dist

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])
Method = Callable[..., dist.Work]  # an operation of a group


def untraced(kind: Kind) -> Kind:
    """Have the compiler skip all functions of a class, and all that they call.

    They run in the middle of compiled code, and cannot be compiled. The official way to declare
    that imports the compiler, which would cost every job without torch.compile a second or two.
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


_has_modes = torch._C._len_torch_dispatch_stack
_has_profiler = torch._C._autograd._profiler_enabled
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


def recorded(
    method: Method,
    group: Any,  # noqa: ANN401 - of operations.py
    given: Sequence[Any],
    named: dict[str, Any],
) -> dist.Work:
    """Call a method of one of our groups, recorded as an event if a profiler runs.

    The event is called `rallypoint:all_reduce` or the like, with sizes and group. The names of the
    details are those of torch's own `record_param_comms`, which trace readers know. `given` are its
    arguments: outputs and inputs, or the tensors that are both.
    """
    if not _has_profiler():
        return method(group, *given, **named)
    name = _NAMES.get(method.__name__, method.__name__)
    engine_group = group.engine_group
    outputs = list(tensors_in(given[:1]))
    inputs = list(tensors_in(given[1:2])) or outputs
    details = {
        "Collective name": name,
        "dtype": str(inputs[0].dtype).removeprefix("torch.") if inputs else "",
        "In msg nelems": sum(tensor.numel() for tensor in inputs),
        "Out msg nelems": sum(tensor.numel() for tensor in outputs),
        "In msg size": sum(tensor.numel() * tensor.element_size() for tensor in inputs),
        "Out msg size": sum(tensor.numel() * tensor.element_size() for tensor in outputs),
        "Group size": engine_group.size(),
        "Process Group Name": engine_group.group_name,
        "Process Group Ranks": str(list(engine_group.ranks)),
    }
    with _Event(f"rallypoint:{name}", [*inputs, *outputs], details):
        return method(group, *given, **named)


def tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    """The tensors among these values, and in lists among them."""
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from tensors_in(each)


def routed(method: Function) -> Function:
    """Make a method whose first argument contains tensors call `detour` where necessary."""

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


def routed_alone(method: Function) -> Function:
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


class _Published(threading.local):
    """The work of this thread's last call that reached a backend, for the group that made it."""

    work: dist.Work | None = None


_published = _Published()


def publish_work(work: dist.Work) -> dist.Work:
    """Leave a backend's work for `published_work`: torch's Work around it offers little."""
    _published.work = work
    return work


def published_work(call: Callable[[], dist.Work]) -> dist.Work:
    """Make a call that passes torch; returns the work that the backend published.

    If a dispatch mode or another backend took the call: what these returned.
    """
    _published.work = None
    try:
        result = call()
        return result if _published.work is None else _published.work
    finally:
        _published.work = None
