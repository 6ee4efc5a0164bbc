"""Keeps torch.compile from tracing the methods of a backend.

C++ calls them in the middle of compiled code. Nothing in them can be compiled, and the official way
to say so would import the compiler, which takes a second or two, in every training without it.
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
        return kind  # another version of PyTorch: slower under torch.compile, or not at all
    skip = compiler._FrameAction.SKIP
    strategy = compiler._FrameExecStrategy(skip, skip)
    for member in vars(kind).values():
        if isinstance(member, types.FunctionType):
            compiler.set_code_exec_strategy(member.__code__, strategy)
    return kind
