"""A thread that carries out a group's calls in their order, and the works of these calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rallypoint.base.errors import CollectiveTimeoutError
from rallypoint.engine.engine_work import report
from rallypoint.pytorch.tools import untraced
from rallypoint.pytorch.torch_work import Running

_MOST_AT_END_S = 5.0
Function = Callable[[], None]
Callback = Callable[[Any], object]


@untraced
class _Queued(dist.Work):
    """An operation that a thread carries out later."""

    def __init__(self, function: Function, operation: str, outputs: Sequence[Any]) -> None:
        dist.Work.__init__(self)
        self.operation = operation
        self._function: Function | None = function
        self._outputs = outputs
        self._lock = threading.RLock()  # a signal handler may add a callback while one is added
        self._has_ended = threading.Event()
        self._error: Exception | None = None
        self._callbacks: list[Callback] = []

    def carry_out(self) -> None:
        """Run it, once."""
        function, self._function = self._function, None
        assert function is not None, "only once"
        try:
            function()
        except Exception as error:
            self._error = error
        with self._lock:
            self._has_ended.set()
        if self._callbacks:  # one may wait for what this thread has yet to carry out
            threading.Thread(target=self._call_back, args=[self._callbacks], daemon=True).start()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See Work."""
        if not self._has_ended.wait(None if timeout is None else timeout.total_seconds()):
            raise CollectiveTimeoutError(
                f"{self.operation} was not completed within {timeout}; it is still running, so "
                "wait again, or abort the group",
                operation=self.operation,
            )
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """See Work."""
        return self._has_ended.is_set()

    def is_success(self) -> bool:
        """Whether the operation has ended successfully."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """The error of a completed operation, or None."""
        return self._error

    def source_rank(self) -> int:
        """-1: it is a collective."""
        return -1

    _source_rank = source_rank

    def add_done_callback(self, callback: Callback) -> None:
        """Call `callback(self)` on completion, or at once; its error is reported, not raised."""
        with self._lock:
            if not self._has_ended.is_set():
                self._callbacks.append(callback)
                return
        self._call_back([callback])

    def _call_back(self, callbacks: Sequence[Callback]) -> None:
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:
                report(error)


class QueuedWork(Running, _Queued):
    """A call that continues in the group's thread."""

    __init__ = _Queued.__init__  # Running has none


class CallQueue:
    """The thread, which starts when it is first needed.

    Args:
        tidy: called after each call, and every `period_s` while it returns that it has more to do.
    """

    def __init__(self, tidy: Callable[[], bool], period_s: float) -> None:
        self._tidy, self._period_s = tidy, period_s
        self._lock = threading.RLock()
        self._works = queue.SimpleQueue[QueuedWork | bool]()  # true: to tidy; false: to end
        self._waiting = 0
        self._is_watching = False  # the thread tidies again soon
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all calls have been carried out."""
        return self._waiting == 0

    def put(self, work: QueuedWork | bool) -> None:
        """Carry it out after those before it; true: only tidy."""
        with self._lock:
            self._waiting += work is not True
            self._works.put(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="rallypoint-device", daemon=True
                )
                self._thread.start()

    def wake(self) -> None:
        """There is something to tidy, as of now."""
        if not self._is_watching:
            self.put(True)

    def close(self) -> bool:
        """End the thread, if it is in no call that does not end; whether it has ended."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None or thread is threading.current_thread():
            return thread is None
        self._works.put(False)
        thread.join(_MOST_AT_END_S)
        return not thread.is_alive()

    def _serve(self) -> None:
        while True:
            with suppress(queue.Empty):
                work = self._works.get(timeout=self._period_s if self._is_watching else None)
                if work is False:
                    return
                if isinstance(work, QueuedWork):
                    work.carry_out()
                    with self._lock:
                        self._waiting -= 1
                del work  # else it lives until the next one
            self._is_watching = False  # so `wake` is heard from here on
            self._is_watching = self._tidy()
