"""Operations under way, as PyTorch knows them: torch.distributed.Work.

C++ callers (DDP's reducer, functional collectives) see only `wait` and `get_future`. A future that
fails must fail by a callback that raises: one with `set_exception` looks well to C++.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from rallypoint.process_group.point_to_point import Message
from rallypoint.process_group.work import ManyWorks, Work
from rallypoint.pytorch.untraced import untraced

_NO_TIMEOUT = timedelta(0)
_NO_GRAPH = -1


class _Telling(threading.local):
    """In a thread that tells what follows a work: where works go that this begins."""

    followers: list[RunningWork] | None = None


_telling = _Telling()


@untraced
class DoneWork(dist.Work):
    """An operation that was over when its call returned, and went well."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """There is nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True

    def is_success(self) -> bool:
        """It is."""
        return True

    def exception(self) -> None:
        """There is none."""

    def result(self) -> list[Any]:
        """The tensors that it filled in."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """There is no stream to synchronize with."""

    block_current_stream = synchronize

    def get_future(self) -> Any:  # noqa: ANN401 - of torch
        """A future that holds `result()`."""
        if _is_for_typed_hook(self._outputs):
            return _typed(self.result())
        future = Future()
        future.set_result(self.result())
        return future


@untraced
class RunningWork(dist.Work):
    """An operation that goes on in the background.

    Args:
        work: the engine's.
        outputs: the tensors that it fills in.
        finish: called once, before anyone is told that it went well; what it raises is raised by
            `wait`.
    """

    def __init__(
        self, work: Work, outputs: Sequence[Any], finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self.engine_work = work
        self._outputs = list(outputs)
        self._finish = finish
        self._unfinished: Exception | None = None  # what `finish` raised
        self._lock = threading.Lock()
        self._signal: Any = None
        self._future: Any = None
        self._is_told = threading.Event()
        self._followers: list[RunningWork] = []  # begun by what follows this one, or them

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until it is completed.

        Raises:
            PeerError: it failed; MismatchError, PeerLostError and the others say how.
            CollectiveTimeoutError: `timeout` is over; the operation still goes on.
        """
        try:
            self.engine_work.wait(timeout or None)
        finally:
            self._tell_if_over()
        if self._unfinished is not None:
            raise self._unfinished
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or with an error; never waits."""
        if not self.engine_work.is_completed():
            return False
        self._tell_if_over()
        return True

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Once it is over: what went wrong, or None."""
        return (self.engine_work.exception() or self._unfinished) if self.is_completed() else None

    def result(self) -> list[Any]:
        """The tensors that it fills in."""
        return self._outputs

    def synchronize(self) -> None:
        """Wait."""
        self.wait()

    # torch's own would have the stream wait for what may need the stream itself: see Memory.finish.
    block_current_stream = synchronize

    def source_rank(self) -> int:
        """Of a receive that is over: the sender's rank in the group."""
        return self.engine_work.peer() if isinstance(self.engine_work, Message) else -1

    _source_rank = source_rank

    def get_future(self) -> Any:  # noqa: ANN401 - of torch
        """A future of `result()`; what follows it may wait for other operations.

        Asked for during a backward pass, as DDP does, its error is raised at the end of that pass
        as what it is, not only as the RuntimeError that C++ makes of it; and so are those of what
        its callbacks begin, as PowerSGD's do.
        """
        if _is_for_typed_hook(self._outputs):
            self.wait()
            return _typed(self._outputs)
        with self._lock:
            is_first = self._future is None
            if is_first:
                self._signal = Future()
                self._future = self._signal.then(self._value)
        if is_first:
            self.engine_work.get_future().add_done_callback(lambda _: self._tell_if_over())
            if torch._C._current_graph_task_id() != _NO_GRAPH:
                Variable._execution_engine.queue_callback(self._end_backward)
            elif _telling.followers is not None:
                self._followers = _telling.followers
                self._followers.append(self)
        return self._future

    def _end_backward(self) -> None:
        """Called before DDP waits in C++."""
        self.wait()
        self._is_told.wait()
        while self._followers:
            follower = self._followers.pop(0)
            follower.wait()
            follower._is_told.wait()

    def _value(self, _: object) -> list[Any]:
        error = self.exception()
        if error is not None:
            raise error
        return self._outputs

    def _tell_if_over(self) -> None:
        """Once: finish, and complete the future."""
        if not self.engine_work.is_completed():
            return
        with self._lock:
            finish, self._finish = self._finish, None
            signal, self._signal = self._signal, None
            if finish is not None and self.engine_work.exception() is None:
                try:
                    finish()
                except Exception as error:
                    self._unfinished = error
        if signal is None:
            return
        outer, _telling.followers = _telling.followers, self._followers
        try:
            signal.set_result(None)  # outside of the lock: what follows runs in here
        finally:
            _telling.followers = outer
            self._is_told.set()


def joined(works: Sequence[Any], outputs: Sequence[Any]) -> Any:  # noqa: ANN401 - a Work
    """Several works as one."""
    for work in works:
        if not isinstance(work, DoneWork | RunningWork):
            work.wait()  # NCCL's, which has the stream wait, and not this thread
    running = [work for work in works if isinstance(work, RunningWork)]
    if not running:
        return DoneWork(outputs)

    def finish() -> None:
        for work in running:
            work.wait()

    return RunningWork(ManyWorks([work.engine_work for work in running]), outputs, finish)


def _is_for_typed_hook(outputs: Sequence[Any]) -> bool:
    """Whether DDP's built-in hook for 16-bit floats asks, which is C++ and calls during backward.

    It takes only what C++ knows to be a list of tensors; a list from Python is any object to it.
    """
    if not any(getattr(output, "dtype", None) is torch.float16 for output in outputs):
        return False
    caller = sys._getframe(1).f_back  # of get_future: a hook in Python, or who called backward
    return caller is None or caller.f_globals.get("__name__", "").startswith("torch.autograd")


def _typed(outputs: list[Any]) -> Any:  # noqa: ANN401 - of torch
    """A completed future of what C++ knows to be a list of tensors.

    Only TorchScript makes one. Its futures for later would run on PyTorch's inter-op threads, which
    abort the process now and then when it ends.
    """
    return torch._C.fork(_same().same, outputs)


@cache
def _same() -> Any:  # noqa: ANN401 - of torch
    return torch.jit.CompilationUnit(
        "def same(tensors: List[Tensor]) -> List[Tensor]:\n    return tensors\n"
    )
