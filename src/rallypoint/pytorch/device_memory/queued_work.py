"""A thread that carries out a group's calls in their order, and the works of these calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rallypoint.base.errors import CollectiveTimeoutError
from rallypoint.pytorch.tools import untraced
from rallypoint.pytorch.torch_work import Running

_MOST_AT_END_S = 5.0


@untraced
class _Queued(dist.Work):
    """An operation that a thread carries out later."""

    def __init__(
        self, function: Callable[[], None], operation: str, outputs: Sequence[Any]
    ) -> None:
        dist.Work.__init__(self)
        self.operation = operation
        self._function: Callable[[], None] | None = function
        self._outputs = outputs
        self._ended = Future[Exception | None]()  # its error

    def carry_out(self) -> None:
        """Run it, once."""
        function, self._function = self._function, None
        assert function is not None, "only once"
        found: Exception | None = None
        try:
            function()
        except Exception as error:
            found = error
        self._ended.set_result(found)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See Work."""
        try:
            error = self._ended.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise CollectiveTimeoutError(
                f"{self.operation} was not completed within {timeout}; it is still running, so "
                "wait again, or abort the group",
                operation=self.operation,
            ) from None
        if error is not None:
            raise error
        return True

    def is_completed(self) -> bool:
        """See Work."""
        return self._ended.done()

    def is_success(self) -> bool:
        """Whether the operation has ended successfully."""
        return self._ended.done() and self._ended.result() is None

    def exception(self) -> Exception | None:
        """The error of a completed operation, or None."""
        return self._ended.result() if self._ended.done() else None

    def source_rank(self) -> int:
        """-1: it is a collective."""
        return -1

    _source_rank = source_rank

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` after completion; its error is reported, not raised."""

        def call_back(_: object) -> None:  # it may wait for what the queue's thread has yet to do
            threading.Thread(target=callback, args=[self], daemon=True).start()

        self._ended.add_done_callback(call_back)


class QueuedWork(Running, _Queued):
    """A call that continues in the group's thread."""

    __init__ = _Queued.__init__  # Running has none


class CallQueue:
    """The thread, which starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._works = queue.SimpleQueue[QueuedWork | None]()  # None: to end
        self._waiting = 0
        self._thread: threading.Thread | None = None

    @property
    def is_empty(self) -> bool:
        """Whether all calls have been carried out."""
        return self._waiting == 0

    def put(self, work: QueuedWork) -> None:
        """Carry it out after those before it."""
        with self._lock:
            self._waiting += 1
            self._works.put(work)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="rallypoint-device", daemon=True
                )
                self._thread.start()

    def close(self) -> None:
        """End the thread, if it is in no call that does not end."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)
            if thread is not threading.current_thread():
                thread.join(_MOST_AT_END_S)

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work.carry_out()
            with self._lock:
                self._waiting -= 1
            del work  # else it lives until the next one
