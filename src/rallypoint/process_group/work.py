"""Handles of operations that go on while Python does something else: torch.distributed's Work.

The engine carries them out (engine.work); here they get their group's errors, results and futures.
An operation's arrays must not be touched before it is completed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from rallypoint import _native
from rallypoint.base.errors import RallypointError
from rallypoint.engine.work import Work as EngineWork
from rallypoint.engine.work import report
from rallypoint.process_group.groups.accounts import Site, failure
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.memory.arrays import describe
from rallypoint.store.store import seconds_of


class Work(Protocol):
    """One operation under way, or several."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is completed; returns True.

        Raises:
            PeerError: it failed; MismatchError, PeerLostError and the others say how.
            CollectiveTimeoutError: `timeout` is over; the operation still goes on.
        """

    def is_completed(self) -> bool:
        """Whether it is over, well or with an error; never waits."""

    def is_success(self) -> bool:
        """Whether it is over and went well."""

    def exception(self) -> Exception | None:
        """Once it is completed: what went wrong, or None."""

    def result(self) -> list[Any]:
        """The arrays that it fills in."""

    def source_rank(self) -> int:
        """Of a receive that is completed: the sender's global rank; else -1."""

    def get_future(self) -> Future:
        """What will hold `result()` once it is completed, and can call back then."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` when it is completed: at once if it is, else in another thread."""


class Called(NamedTuple):
    """What was called, for the words of an error.

    Attributes:
        what: its arrays.
        root: a rank in the group.
        variant: which algorithm was asked for (planning.Algorithms).
        site: where the user's code called, if the call has returned since.
    """

    operation: str
    what: object
    op: int = 0
    root: int = 0
    variant: int = 0
    site: Site | None = None

    def error(self, group: ProcessGroup, code: int) -> RallypointError:
        """The error for a result of the engine that is not 0."""
        return failure(
            group,
            code,
            self.operation,
            "" if self.operation == "barrier" else describe(self.what),
            op=self.op,
            root=self.root,
            variant=self.variant,
            site=self.site,
        )


class OneWork(EngineWork):
    """One operation of the engine.

    Args:
        native: what the communicator's `submit` or `post` returned.
        outputs: what it fills in.
        finish: as in engine.work.
    """

    def __init__(
        self,
        native: _native.Work,
        group: ProcessGroup,
        called: Called,
        outputs: Sequence[Any],
        finish: Callable[[], None] | None = None,
    ) -> None:
        # As EngineWork's own, without the time that a call takes.
        self._native = native
        self._communicator = group.communicator
        self.operation = called.operation
        self._finish = finish
        self._lock = threading.Lock()
        self._group = group
        self._called = called
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See Work."""
        if timeout is not None:
            seconds_of(timeout)  # or it is refused
        return super().wait(timeout)

    def result(self) -> list[Any]:
        """See Work."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """See Work."""
        place = self.peer if self.operation == "irecv" else -1
        return -1 if place < 0 else self._group.ranks[place]

    def get_future(self) -> Future:
        """See Work."""
        return Future.of(self)

    def _failure(self) -> Exception:
        if self._group.is_destroyed:  # others cannot be asked any more
            return super()._failure()
        return self._called.error(self._group, 1)


class ManyWorks:
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See Work; the timeout is that of each."""
        return all(work.wait(timeout) for work in self.works)

    def is_completed(self) -> bool:
        """See Work."""
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        """See Work."""
        return all(work.is_success() for work in self.works)

    def exception(self) -> Exception | None:
        """See Work: the first one's."""
        return next((error for work in self.works if (error := work.exception())), None)

    def result(self) -> list[Any]:
        """See Work."""
        return [array for work in self.works for array in work.result()]

    def source_rank(self) -> int:
        """See Work: of several, there is none."""
        return -1

    def get_future(self) -> Future:
        """See Work."""
        return Future.of(self)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See Work: of the last one."""
        left, lock = [len(self.works)], threading.Lock()

        def one_done(_: object) -> None:
            with lock:
                left[0] -= 1
                is_last = left[0] == 0
            if is_last:
                callback(self)

        if not self.works:
            callback(self)
        for work in self.works:
            work.add_done_callback(one_done)


def together(works: Sequence[Work | None], async_op: bool) -> Work | None:
    """Several operations as one: waited for, or returned if `async_op` is true."""
    whole = ManyWorks([work for work in works if work is not None])
    if async_op:
        return whole
    whole.wait()
    return None


class Future:
    """A value that comes later: as much of torch.futures.Future as communication needs.

    Callbacks run in a thread of their own, or at once if the value is there already.
    """

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Future], object]] = []
        self._value: Any = None
        self._error: BaseException | None = None

    @classmethod
    def of(cls, work: Work) -> Future:
        """Of a work's result."""
        future = cls()
        work.add_done_callback(lambda _: future._settle(work.result(), work.exception()))
        return future

    def done(self) -> bool:
        """Whether the value, or an error, is there."""
        return self._is_done.is_set()

    def wait(self) -> Any:  # noqa: ANN401 - whatever the callbacks return
        """Wait for the value; raises the error if there is one instead."""
        self._is_done.wait()
        return self.value()

    def value(self) -> Any:  # noqa: ANN401 - whatever the callbacks return
        """The value, which must be there; raises the error if there is one instead."""
        if self._error is not None:
            raise self._error
        return self._value

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call `callback(self)` once the value or the error is there.

        What it raises is reported as an error of a thread is (threading.excepthook).
        """
        with self._lock:
            if not self._is_done.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """A future of what `callback(self)` returns, once this one's value is there."""
        following = Future()

        def go_on(_: Future) -> None:
            try:
                value = callback(self)
            except BaseException as error:
                following._settle(None, error)
            else:
                following._settle(value, None)

        self.add_done_callback(go_on)
        return following

    def _settle(self, value: Any, error: BaseException | None) -> None:  # noqa: ANN401
        with self._lock:
            self._value, self._error = value, error
            self._is_done.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Future], object]) -> None:
        """Whatever it does: others follow."""
        try:
            callback(self)
        except BaseException as error:
            report(error)
