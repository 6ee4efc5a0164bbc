"""What a call is to do, and the handle of an operation that runs while Python does something else.

The handle is torch.distributed's Work. The engine carries operations out (engine_work); this module
adds their group's errors, results and futures. Do not touch an operation's arrays before it is
completed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from rallypoint import _native
from rallypoint.base.collective import Collective
from rallypoint.base.errors import RallypointError
from rallypoint.engine.engine_work import EngineWork, report
from rallypoint.engine.interruption import CHECK_EVERY_S
from rallypoint.process_group.arrays import Blocks
from rallypoint.process_group.groups.call_errors import CallDetails
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.operators import Operator
from rallypoint.store.store import seconds_of


class Work(Protocol):
    """One operation in progress, or several."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is completed; returns True.

        Args:
            timeout: the limit for this wait; the operation's own timeout if None.

        Raises:
            MismatchError, DeadlockError, PeerLostError, PeerError: the operation failed.
            CollectiveTimeoutError: `timeout` is over; the operation is still running.
        """

    def is_completed(self) -> bool:
        """Whether the operation has ended, with or without an error; never waits."""

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""

    def exception(self) -> Exception | None:
        """The error of a completed operation, or None."""

    def result(self) -> list[Any]:
        """The arrays that the operation fills in."""

    def source_rank(self) -> int:
        """The sender's global rank of a completed receive; otherwise -1."""

    def get_future(self) -> Future:
        """A future of `result()`, to wait for or to chain callbacks to."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` on completion: now if completed, else in another thread."""


class OneWork(EngineWork):
    """One operation of the engine: a Work, but not by inheritance, as pytorch derives from torch's.

    Arguments are as in EngineWork; `outputs` are the arrays that it fills in.
    """

    def __init__(
        self,
        native: _native.Work,
        group: ProcessGroup,
        called: CallDetails,
        outputs: Sequence[Any],
        finish: Callable[[], None] | None = None,
    ) -> None:
        # Like EngineWork's own, without the time of a call.
        self._native = native
        self._communicator = group.communicator
        self.operation = called.operation
        self._finish = finish
        if finish is not None:
            self._lock = threading.RLock()
        self._group = group
        self._called = called
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            seconds_of(timeout)  # refuses invalid values
        return super().wait(timeout)

    def result(self) -> list[Any]:
        """The arrays that the operation fills in."""
        return list(self._outputs)

    def source_rank(self) -> int:
        """The sender's global rank of a completed receive; otherwise -1."""
        sender = self.peer if self.operation == "irecv" else -1
        return -1 if sender < 0 else self._communicator.global_rank(sender)

    def get_future(self) -> Future:
        """A future of `result()`."""
        return Future.of(self)

    def _failure(self) -> Exception:
        if not self._group.is_served_by(self._communicator):  # the others cannot be asked any more
            return super()._failure()
        return self._called.error(self._group, 1)


class CollectiveCall(NamedTuple):
    """One call of a collective, for the engine or another library; its arguments are checked.

    Attributes:
        operation: the public function, for messages.
        inputs, outputs: arrays of one dtype, contiguous or not.
        timeout, algorithm: the group's if None.
        root: a rank in the group.
        uneven: blocks may differ in length, here or on other ranks.
        results: the result of the work; the outputs unless given.
        then: called after success, when the outputs are filled in.
        work_type: of the engine's work.
    """

    collective: Collective
    operation: str
    inputs: Blocks
    outputs: Blocks
    async_op: bool = False
    timeout: timedelta | None = None
    algorithm: str | None = None
    op: Operator | None = None
    root: int = 0
    uneven: bool = False
    results: Sequence[Any] | None = None
    then: Callable[[], None] | None = None
    work_type: type[OneWork] = OneWork


class ManyWorks:
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = list(works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all; the timeout applies to each."""
        return all(work.wait(timeout) for work in self.works)

    def is_completed(self) -> bool:
        """Whether all have ended, with or without an error; never waits."""
        return all(work.is_completed() for work in self.works)

    def is_success(self) -> bool:
        """Whether all have ended without an error."""
        return all(work.is_success() for work in self.works)

    def exception(self) -> Exception | None:
        """The first error, or None."""
        return next((error for work in self.works if (error := work.exception())), None)

    def result(self) -> list[Any]:
        """The arrays that the operations fill in."""
        return [array for work in self.works for array in work.result()]

    def source_rank(self) -> int:
        """-1, because there are several operations."""
        return -1

    def get_future(self) -> Future:
        """A future of `result()`."""
        return Future.of(self)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback(self)` on completion of the last one."""
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
    """Several operations as one: completed, or returned if `async_op` is true."""
    whole = ManyWorks([work for work in works if work is not None])
    if async_op:
        return whole
    whole.wait()
    return None


@contextmanager
def ended_on_error(works: Sequence[Any]) -> Iterator[None]:
    """If an error ends the block, wait for the operations first: then no array changes any more."""
    try:
        yield
    except Exception:
        for work in works:
            with suppress(RallypointError):
                work.wait()
        raise


class Future:
    """A value that is available later: the part of torch.futures.Future that communication needs.

    Callbacks run in a separate thread, or immediately if the value is already available.
    """

    def __init__(self) -> None:
        self._is_done = threading.Event()
        self._lock = threading.RLock()  # a signal handler may add a callback while one is added
        self._callbacks: list[Callable[[Future], object]] = []
        self._value: Any = None
        self._error: BaseException | None = None

    @classmethod
    def of(cls, work: Work) -> Future:
        """The future of a work's result."""
        future = cls()
        work.add_done_callback(lambda _: future._settle(work.result(), work.exception()))
        return future

    def done(self) -> bool:
        """Whether the value or an error is available."""
        return self._is_done.is_set()

    def wait(self) -> Any:  # noqa: ANN401 - whatever the callbacks return
        """Wait for the value; raises the error if there is one instead."""
        while not self._is_done.wait(CHECK_EVERY_S):
            pass
        return self.value()

    def value(self) -> Any:  # noqa: ANN401 - whatever the callbacks return
        """The value, which must be available; raises the error if there is one instead."""
        if self._error is not None:
            raise self._error
        return self._value

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Call `callback(self)` once the value or an error is available.

        Its exceptions are reported as those of threads are (threading.excepthook).
        """
        with self._lock:
            if not self._is_done.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def then(self, callback: Callable[[Future], Any]) -> Future:
        """A future of what `callback(self)` returns, once this one's value is available."""
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
        """Run a callback; its errors do not affect the others."""
        try:
            callback(self)
        except BaseException as error:
            report(error)
