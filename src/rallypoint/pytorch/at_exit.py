"""At exit, lets other threads come back from PyTorch's code, where Python's end would find them.

A daemon thread that waits in a call has an error as soon as its group is left, which happens at
exit, and passes PyTorch's C++ code on its way back. If it asks for the GIL there when the
interpreter ends, Python before 3.14 unwinds it, which aborts the process; our own code survives
that (native/python/gil.h).
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from types import FrameType

_MOST_S = 2.0  # without any that has come back: they may wait in calls of another backend, too
_LOOK_EVERY_S = 0.001
_CALLS = "torch.distributed."


def _await_other_threads() -> None:
    left, until = _in_calls(), time.monotonic() + _MOST_S
    while left and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        before, left = left, _in_calls()
        if left < before:
            until = time.monotonic() + _MOST_S


def _in_calls() -> int:
    """How many other threads are in one."""
    own = threading.get_ident()
    frames = sys._current_frames().items()
    return sum(_is_in_a_call(frame) for thread, frame in frames if thread != own)


def _is_in_a_call(innermost: FrameType) -> bool:
    frame: FrameType | None = innermost
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_CALLS):
            return True
        frame = frame.f_back
    return False


# Exit handlers run in reverse order: groups, which are formed later, have been left by then.
atexit.register(_await_other_threads)
