"""Who calls a method of ours: a function in Python, or DDP's reducer, which is C++.

C++ has no frame in Python. What seems to be the caller of a method that C++ calls during a backward
pass is therefore the function that began this pass.
"""

from __future__ import annotations

import sys


def is_called_in_backward(depth: int) -> bool:
    """Whether C++ called, in a backward pass, the function `depth` frames above the caller."""
    frame = sys._getframe(depth + 1).f_back
    return frame is None or frame.f_globals.get("__name__", "").startswith("torch.autograd")
