"""File system calls in a separate thread: where one hangs, nothing else waits for it.

    do(job, then):   job in the thread, one after the other; `then`, with its result, in the loop
    call(job):       the same, waited for, but only for a limited time

The thread starts with the first job, and ends after a while without one. If the system cannot start
a thread, the loop's own does the work.
"""

from __future__ import annotations

import errno
import select
import selectors
from _queue import Empty, SimpleQueue  # importing queue would cost each launch 1 ms
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable

from rallypoint.base.inbox import Inbox

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Any, TypeVar

    T = TypeVar("T")

_PATIENCE_S = 2.0  # the other nodes tolerate a silence of 5 s
_IDLE_S = 1.0


class FileWork:
    """The thread and its queue of jobs, for one other thread, which runs the selector's loop."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]]] = SimpleQueue()
        self._done: Inbox[tuple[Callable[[Any], None], Any]] = Inbox()
        self._has_thread = False
        self._lock = allocate_lock()  # guards it
        self._under_way = 0
        self._hangs = False
        selector.register(self._done, selectors.EVENT_READ, self._run_done)

    def do(self, job: Callable[[], T], then: Callable[[T | OSError], None]) -> None:
        """Do it soon; `then` gets its result or exception."""
        self._jobs.put((job, then))
        self._under_way += 1
        with self._lock:
            if self._has_thread:
                return
            self._has_thread = True
        try:
            start_new_thread(self._run, ())
        except RuntimeError:  # perhaps no more threads can be started: then this one does it
            self._run(idle_s=0)

    def call(self, job: Callable[[], T]) -> T:
        """Do it in the thread, and wait for its result."""
        results: list[T | OSError] = []
        if not self._hangs:
            self.do(job, results.append)
            self._hangs = not self._wait(lambda: bool(results))
        if not results:
            raise OSError(errno.ETIMEDOUT, "the file system does not answer")
        if isinstance(results[0], OSError):
            raise results[0]
        return results[0]

    def flush(self, wait_s: float) -> bool:
        """Wait until all is done; False if no job ends for `wait_s`."""
        return self._wait(lambda: not self._under_way, wait_s)

    def close(self) -> None:
        """Discard all further results."""
        self._selector.unregister(self._done)
        self._done.close()

    def _wait(self, is_over: Callable[[], bool], wait_s: float = _PATIENCE_S) -> bool:
        poll = select.poll()
        poll.register(self._done, select.POLLIN)
        while not is_over():
            if not poll.poll(1000 * wait_s):
                return False
            self._run_done()
        return True

    def _run_done(self) -> None:
        for then, result in self._done.take():
            self._hangs = False
            self._under_way -= 1
            then(result)

    # The thread.

    def _run(self, idle_s: float = _IDLE_S) -> None:
        while True:
            try:
                job, then = self._jobs.get(timeout=idle_s)
            except Empty:
                with self._lock:
                    if self._jobs.empty():
                        self._has_thread = False
                        return
                continue
            try:
                result: Any = job()
            except OSError as error:
                result = error
            self._done.put((then, result))
