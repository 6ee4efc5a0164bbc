"""Asynchronous operations and their callbacks.

The native progress thread carries operations out without the GIL, or the thread that waits for them
does. Callbacks run in separate threads, so that a callback that waits for another operation, or for
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

_NOT_OVER = -1  # in place of an error code
_MOST_AT_EXIT_S = 1.0
_MOST_RUNNING_S = 10.0  # a thread that runs in PyTorch when Python ends would abort the process


class EngineWork:
    """An operation in progress. Its arrays must not be accessed before it has completed.

    Args:
        native: what `Communicator.submit` or `post` returned.
        finish: called once after it has succeeded, before anyone is notified; an exception that it
            raises becomes the operation's error.
    """

    # Objects of this class are created for calls that take microseconds: attributes that are rarely
    # needed are defined here, and all objects share one lock.
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
        self._finish = finish  # None once it has been called
        self._lock = threading.RLock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete, and help to complete it; returns True."""
        code = self._native.wait(-1.0 if timeout is None else timeout.total_seconds())
        if code or self._finish is not None or self._unfinished is not None:
            if code == _NOT_OVER and timeout is not None:
                raise CollectiveTimeoutError(
                    f"{self.operation} was not completed within {timeout.total_seconds():g} s; "
                    "it is still running, so wait again, or abort the group",
                    operation=self.operation,
                )
            error = self._settled(code)
            if error is not None:
                raise error
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, successfully or not; never waits."""
        code = self._native.test()
        if code == _NOT_OVER:
            return False
        self._settle(code)
        return True

    @property
    def peer(self) -> int:
        """For a send or receive: the other rank; -1 if it is not decided yet."""
        return self._native.peer()

    def is_success(self) -> bool:
        """Whether the operation has ended successfully."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """The error of a completed operation, or None."""
        code = self._native.test()
        return None if code == _NOT_OVER else self._settled(code)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` on completion, or at once; its error is reported, not raised."""
        if _callbacks.add(self._native, self, callback):
            return
        try:
            self._run(callback)
        except Exception as error:
            report(error)

    def _settled(self, code: int) -> Exception | None:
        """The error of an operation that has ended, or None."""
        self._settle(code)
        return self._failure() if code else self._unfinished

    def _settle(self, code: int) -> None:
        """Finish an operation that has ended, once. A signal handler amid that does it itself."""
        if self._finish is None:
            return
        with self._lock:
            if self._finish is not None and code == 0:
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
    """Report the error of a callback, for which no call waits, like one that ends a thread."""
    threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, None)))


class _Callbacks:
    """The threads that run callbacks: one waits for completed operations, others run callbacks.

    A thread that is about to run callbacks first makes sure that another one waits, so that a
    callback may wait for what another callback does.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may add one while one is added
        self._changed = threading.Condition(self._lock)
        self._waiting: dict[_native.Work, list[tuple[EngineWork, Callable[[Any], object]]]] = {}
        self._threads: list[threading.Thread] = []
        self._running = 0  # the number of threads that run callbacks
        self._turn = threading.Lock()

    def add(
        self, native: _native.Work, work: EngineWork, callback: Callable[[Any], object]
    ) -> bool:
        """Register a callback; returns False, and does nothing, if the operation has ended."""
        with self._lock:
            if not native.watch():
                return False
            self._waiting.setdefault(native, []).append((work, callback))
            if not self._threads:
                self._start_thread()
        return True

    def close(self) -> None:
        """At the end of the process, once it has left its groups: run the callbacks of that.

        A callback may wait for another's result, so none is dropped while one is running.
        """
        if not self._threads:
            return
        with self._changed:
            self._changed.wait_for(self._is_idle, _MOST_AT_EXIT_S)
            self._changed.wait_for(lambda: self._running == 0, _MOST_RUNNING_S)
        _native.close_work()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_MOST_AT_EXIT_S if self._is_idle() else 0)

    def _is_idle(self) -> bool:
        return self._running == 0 and not self._waiting

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name="rallypoint-callbacks", daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
            thread.start()
            self._threads.append(thread)

    def _serve(self) -> None:
        while self._serve_next():
            pass

    def _serve_next(self) -> bool:
        """A separate function, so that a waiting thread keeps no references to what it has run."""
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
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
        return True


_callbacks = _Callbacks()


def _renew_in_child() -> None:
    global _callbacks  # noqa: PLW0603 - the threads of the parent's are not there
    _callbacks = _Callbacks()


atexit.register(lambda: _callbacks.close())
os.register_at_fork(after_in_child=_renew_in_child)
