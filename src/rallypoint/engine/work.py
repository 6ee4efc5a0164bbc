"""Asynchronous operations and their callbacks.

The native progress thread carries them out without the GIL, or the thread that waits for them does.
Callbacks run in threads of their own, so that a callback that waits for another operation, or for
another callback, does not block it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rallypoint import _native
from rallypoint.base.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from rallypoint.engine.communicator import Communicator

_NOT_OVER = -1  # in place of what went wrong
_MOST_AT_EXIT_S = 1.0
_MOST_RUNNING_S = 10.0  # a thread that runs in PyTorch when Python ends would abort the process


class Work:
    """One operation under way. Its arrays must not be touched before it is completed.

    Args:
        native: what `Communicator.submit` or `post` returned.
        operation: its name, for messages.
        finish: called once it has gone well, before anyone is told; what it raises is then what
            went wrong.
    """

    # Objects of this class are made for calls that take microseconds: what is seldom needed is
    # here, and one lock is for all.
    _unfinished: Exception | None = None  # what `finish` raised

    def __init__(
        self,
        native: _native.Work,
        communicator: Communicator,
        operation: str,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._native = native
        self._communicator = communicator
        self.operation = operation
        self._finish = finish  # until it has been called
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is completed, and help to get there; returns True.

        Raises:
            PeerError: it failed; MismatchError, PeerLostError and the others say how.
            CollectiveTimeoutError: `timeout` is over; the operation still goes on.
        """
        end = self._native.wait(-1.0 if timeout is None else timeout.total_seconds())
        if end or self._finish is not None or self._unfinished is not None:
            if end == _NOT_OVER and timeout is not None:
                raise CollectiveTimeoutError(
                    f"{self.operation} was not completed within {timeout.total_seconds():g} s; "
                    "it is still running, so wait again, or abort the group",
                    operation=self.operation,
                )
            error = self._settled(end)
            if error is not None:
                raise error
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or with an error; never waits."""
        end = self._native.test()
        if end == _NOT_OVER:
            return False
        self._settle(end)
        return True

    @property
    def peer(self) -> int:
        """Of a send or receive: the other rank; -1 while any may be."""
        return self._native.peer()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Once it is completed: what went wrong, or None."""
        end = self._native.test()
        return None if end == _NOT_OVER else self._settled(end)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` when it is completed: at once if it is, else in another thread."""
        if not _callbacks.add(self._native, self, callback):
            self._run(callback)

    def _settled(self, end: int) -> Exception | None:
        """Of an operation that is over: what went wrong, or None."""
        self._settle(end)
        return self._failure() if end else self._unfinished

    def _settle(self, end: int) -> None:
        """Once it is over, once: finish. Whoever comes meanwhile waits."""
        if self._finish is None:
            return
        with self._lock:
            if self._finish is not None and end == 0:
                try:
                    self._finish()
                except Exception as error:
                    self._unfinished = error
            self._finish = None

    def _failure(self) -> Exception:
        return self._communicator.error(self.operation)

    def _run(self, callback: Callable[[Any], object]) -> None:
        self._settle(self._native.end())
        callback(self)


def report(error: BaseException) -> None:
    """Of a callback, whose error nobody waits for: as of a thread that ends with it."""
    threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))


class _Callbacks:
    """The threads that run callbacks: one waits for what is done next, others run what follows.

    Who is to run callbacks first sees to it that another thread waits, so that a callback may wait
    for what another callback does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._waiting: dict[_native.Work, list[tuple[Work, Callable[[Any], object]]]] = {}
        self._threads: list[threading.Thread] = []
        self._running = 0  # threads that run callbacks
        self._turn = threading.Lock()

    def add(self, native: _native.Work, work: Work, callback: Callable[[Any], object]) -> bool:
        """Returns False, and does nothing, if the operation is over already."""
        with self._lock:
            if not native.watch():
                return False
            self._waiting.setdefault(native, []).append((work, callback))
            if not self._threads:
                self._start_thread()
        return True

    def close(self) -> None:
        """The process ends, and has left its groups: run what follows from that, but no more.

        A callback may wait for another one's, so none is dropped as long as one runs.
        """
        if not self._threads:
            return
        with self._told:
            self._told.wait_for(self._is_idle, _MOST_AT_EXIT_S)
            self._told.wait_for(lambda: self._running == 0, _MOST_RUNNING_S)
        _native.close_work()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_MOST_AT_EXIT_S if self._is_idle() else 0)

    def _is_idle(self) -> bool:
        return self._running == 0 and not self._waiting

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name="rallypoint-callbacks", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends
            thread.start()
            self._threads.append(thread)

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """A function of its own, so that a thread that waits keeps nothing of what it has run."""
        with self._turn:
            native = _native.next_done()
            if native is None:
                return False
            with self._lock:
                waiting = self._waiting.pop(native, [])
                self._running += 1
                if self._running == len(self._threads):
                    self._start_thread()
        for work, callback in waiting:
            try:
                work._run(callback)
            except BaseException as error:
                report(error)
        with self._told:
            self._running -= 1
            self._told.notify_all()
        return True


_callbacks = _Callbacks()


def _renew_in_child() -> None:
    global _callbacks  # noqa: PLW0603 - the threads of the parent's are not there
    _callbacks = _Callbacks()


atexit.register(lambda: _callbacks.close())
os.register_at_fork(after_in_child=_renew_in_child)
