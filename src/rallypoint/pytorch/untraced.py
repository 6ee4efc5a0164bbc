"""Keeps torch.compile from tracing the methods of a backend.

C++ calls them in the middle of compiled code. Nothing in them can be compiled, but the official way
to say so imports the compiler, which would cost every job without torch.compile a second or two.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

import torch

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Have the compiler skip all functions of a class, and all that they call."""
    compiler: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if not hasattr(compiler, "set_code_exec_strategy"):
        return kind  # in this version of PyTorch, torch.compile is slower, or fails
    skip = compiler._FrameAction.SKIP
    strategy = compiler._FrameExecStrategy(skip, skip)
    for member in vars(kind).values():
        if isinstance(member, types.FunctionType):
            compiler.set_code_exec_strategy(member.__code__, strategy)
    return kind
