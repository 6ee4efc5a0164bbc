"""Calls that signal handlers make, in the middle of another call of the main thread.

Python runs handlers in the main thread, between two instructions and in waits. One that interrupts
a call of the engine may make further calls: these come after it, on every rank. For that, the
interrupted call must proceed meanwhile, without the thread that made it:

    a call of the engine            the progress thread stands by (native/engine/communicator.h)
    a group that forms, in Python   `beside_handlers`: another thread forms it
    several calls in a row          cannot: a handler's call would come between them. It is refused

Exceptions of a handler end what it interrupts. docs/decisions/114-calls-in-handlers.md.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Generic, TypeVar

from rallypoint._native import interrupted_frame, raise_in_thread
from rallypoint.base.errors import CallerError

T = TypeVar("T")

# A signal that comes just before this thread sleeps, or to another thread, does not wake this one.
CHECK_EVERY_S = 0.5
_UNWOUND_S = 2.0  # most waits check once a second whether to continue
_LIBRARIES = ("rallypoint.", "torch.")
# Functions of ours and of torch.distributed that make several calls, each of which depends on the
# one before.
_ONE_OF_SEVERAL = {
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "monitored_barrier",
}


def may_run_handlers() -> bool:
    """Whether this thread may run signal handlers of the program, which may do anything."""
    if threading.get_ident() != threading.main_thread().ident:
        return False
    handlers = (_signal.getsignal(number) for number in range(1, signal.NSIG))
    return any(
        callable(handler) and handler is not signal.default_int_handler for handler in handlers
    )


def refuse_among_others() -> None:
    """Refuse a handler's call that would come between those of one function."""
    frame: FrameType | None = interrupted_frame()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
        name = frame.f_code.co_name
        if name in _ONE_OF_SEVERAL:
            raise CallerError(
                f"a signal handler cannot communicate in the middle of {name}, whose next call the "
                f"other ranks wait for; set a flag in the handler, and check it after {name}"
            )
        frame = frame.f_back


def beside_handlers(function: Callable[[], T]) -> T:
    """The result of a function that synchronizes with other ranks in several steps, whatever
    handlers do.

    If handlers may run in this thread, another one carries the function out: a handler may wait for
    ranks that wait for its next step.
    """
    refuse_among_others()
    if not may_run_handlers():
        return function()
    task = _Task(function)
    try:
        task.thread.start()
        while not task.is_over.acquire(timeout=CHECK_EVERY_S):
            pass
    except BaseException:  # of a handler
        raise_in_thread(task.thread.ident or 0, KeyboardInterrupt)
        task.is_over.acquire(timeout=_UNWOUND_S)
        task.abandon()
        raise
    return task.result()


class _Task(Generic[T]):
    """A function that runs in a thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._returned: list[T] = []
        self._raised: BaseException | None = None
        self._is_abandoned = False
        # Not an Event, in whose methods a handler cannot wait for it.
        self.is_over = threading.Lock()
        self.is_over.acquire()
        self.thread = threading.Thread(target=self._run, name="rallypoint-forming", daemon=True)

    def result(self) -> T:
        """What it returned; raises what it raised."""
        error, self._raised = self._raised, None
        try:
            if error is not None:
                raise error
            return self._returned.pop()
        finally:
            del error  # which refers to this frame

    def abandon(self) -> None:
        """Drop the result. An error keeps its frames, thus what was half formed, which others
        would take for a rank that takes part.
        """
        self._is_abandoned = True
        self._returned.clear()
        self._raised = None

    def _run(self) -> None:
        try:
            assert self._function is not None
            self._returned.append(self._function())
        except BaseException as error:
            self._raised = error
        finally:
            self._function = None  # and what it refers to
            if self._is_abandoned:
                self.abandon()
            self.is_over.release()
