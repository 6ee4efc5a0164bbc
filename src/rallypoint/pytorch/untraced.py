"""Keeps torch.compile from tracing the methods of a backend, and functions in PyTorch's place.

They run in the middle of compiled code. Nothing in them can be compiled, but the official way to
say so imports the compiler, which would cost every job without torch.compile a second or two.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type)
Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(kind: Kind) -> Kind:
    """Have the compiler skip all functions of a class, and all that they call."""
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
