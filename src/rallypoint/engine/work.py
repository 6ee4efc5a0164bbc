"""Operations that go on while Python does something else, and what follows when they are done.

They are carried out by the native progress thread, without the GIL, or by whoever waits for them.
Callbacks run in threads of their own, so that one that waits for another operation, or for another
callback, cannot keep it from being carried out.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from rallypoint import _native
from rallypoint.base.errors import CollectiveTimeoutError, PeerError

if TYPE_CHECKING:
    from rallypoint.engine.communicator import Communicator

_MOST_AT_EXIT_S = 1.0
_MOST_RUNNING_S = 10.0  # a thread that runs in PyTorch when Python ends would abort the process


class Work:
    """One operation under way. Its arrays must not be touched before it is completed.

    Args:
        finish: called once, before anyone is told that it is completed; not after an error.
    """

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
        self._finish = finish
        self._settling = threading.Lock()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is completed, and help to get there.

        Raises:
            PeerError: it failed; MismatchError, PeerLostError and the others say how.
            CollectiveTimeoutError: `timeout_s` is over; the operation still goes on.
        """
        if not self._native.wait(-1 if timeout_s is None else timeout_s):
            raise CollectiveTimeoutError(
                f"{self.operation} was not completed within {timeout_s:g} s; it still goes on, so "
                "wait again, or abort the group",
                operation=self.operation,
            )
        error = self._settle()
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        """Whether it is over, well or with an error; never waits."""
        if not self._native.test():
            return False
        self._settle()
        return True

    @property
    def peer(self) -> int:
        """Of a send or receive: the other rank; -1 while any may be."""
        return self._native.peer()

    def exception(self) -> PeerError | None:
        """Once it is completed: what went wrong, or None."""
        return self._settle() if self._native.test() else None

    def add_done_callback(self, callback: Callable[[Work], object]) -> None:
        """Call `callback(self)` when it is completed: at once if it is, else in another thread."""
        if not _callbacks.add(self._native, self, callback):
            self._settle()
            callback(self)

    def _settle(self) -> PeerError | None:
        if self._native.trouble() != 0:
            return self._communicator.error(self.operation)
        with self._settling:
            finish, self._finish = self._finish, None
            if finish is not None:
                finish()
        return None

    def _run(self, callback: Callable[[Work], object]) -> None:
        self._settle()
        callback(self)


class _Callbacks:
    """The threads that run callbacks: one waits for what is done next, others run what follows.

    Who is to run callbacks first sees to it that another thread waits, so that a callback may wait
    for what another callback does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        self._waiting: dict[_native.Work, list[tuple[Work, Callable[[Work], object]]]] = {}
        self._threads: list[threading.Thread] = []
        self._running = 0  # threads that run callbacks
        self._turn = threading.Lock()

    def add(self, native: _native.Work, work: Work, callback: Callable[[Work], object]) -> bool:
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
                threading.excepthook(
                    threading.ExceptHookArgs((type(error), error, error.__traceback__, None))
                )
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
