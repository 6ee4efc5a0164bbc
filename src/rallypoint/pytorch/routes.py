"""Decides how a call reaches the engine: directly, or through torch's dispatcher for tools.

    dist.all_reduce ----> group.allreduce ------------------------------> engine
                              |                                              ^
                              |  a profiler, a dispatch mode, a hook, ...    |
                              +--> c10d::allreduce_ --> backend.allreduce ---+

The direct way takes 4 us, the other one twice as long, because it passes torch's dispatcher, where
tools observe. The checks here are the only cost of the choice. Each class describes its own way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

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
