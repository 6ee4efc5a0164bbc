"""Operations in progress, in PyTorch's form: torch.distributed.Work.

C++ callers (DDP's reducer, functional collectives) see only `wait` and `get_future`. A future that
fails must fail through a callback that raises: to C++, one with `set_exception` looks successful.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.futures import Future

from rallypoint.engine.engine_work import EngineWork
from rallypoint.process_group.groups.call_errors import CallDetails
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.process_group.work import ManyWorks, OneWork
from rallypoint.pytorch.tools import tensors_in, untraced

if TYPE_CHECKING:
    from rallypoint import _native

    _Base = OneWork  # of Running, which is mixed into it, and into ManyWorks
else:
    _Base = object

UNSET = timedelta(milliseconds=-1)  # in the options of a call: no timeout is given
_NO_TIMEOUT = timedelta(0)
_NO_GRAPH = -1
_init = dist.Work.__init__  # in which each fraction of a microsecond counts


class _InCallbacks(threading.local):
    """While callbacks of a work run in this thread: collects the works that they begin."""

    followers: list[Running] | None = None


_in_callbacks = _InCallbacks()
# All works share it: few have futures, and it is held for microseconds. A signal handler may make
# one in the middle of another.
_of_futures = threading.RLock()


@untraced
class DoneWork(dist.Work):
    """An operation that had succeeded when its call returned."""

    def __init__(self, outputs: Sequence[Any]) -> None:
        _init(self)
        self._outputs = outputs

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Nothing to wait for."""
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def is_success(self) -> bool:
        """Always true."""
        return True

    def exception(self) -> None:
        """No error."""

    def result(self) -> list[Any]:
        """The tensors that the operation filled."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """No stream to synchronize with."""

    block_current_stream = synchronize

    def get_future(self) -> Future[list[Any]]:
        """A future that holds `result()`."""
        if _is_for_typed_hook(self._outputs):
            return _typed(self.result())
        future = future_of(self._outputs)
        future.set_result(self.result())
        return future


class Running(_Base):
    """What PyTorch asks of works that may still be running: of one operation, and of several."""

    # Most works are only waited for: attributes that are rarely needed are created on demand.
    _signal: Future[None] | None = None  # completes the future
    _future: Future[list[Any]] | None = None
    _is_complete: threading.Event | None = None  # the future, its callbacks included
    _followers: list[Running] | None = None  # works begun by callbacks of this one

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete; PyTorch passes a timeout of 0 for none."""
        try:
            super().wait(timeout or None)
        finally:
            if self._signal is not None:
                self._complete_future()
        return True

    def is_completed(self) -> bool:
        """Whether the operation has ended, successfully or not; never waits."""
        if not super().is_completed():
            return False
        if self._signal is not None:
            self._complete_future()
        return True

    def result(self) -> list[Any]:
        """The tensors that the operation fills."""
        return list(self._outputs)

    def synchronize(self) -> None:
        """Wait until the operation is complete."""
        self.wait()

    # torch's version would make the stream wait for something that may need the stream itself: see
    # Memory.finish.
    block_current_stream = synchronize

    def get_future(self) -> Future[list[Any]]:
        """A future of `result()`; its callbacks may wait for other operations.

        If requested during a backward pass, as DDP does, its error is raised unchanged at the end
        of that pass, not only as the RuntimeError that C++ turns it into. The same holds for errors
        of operations that its callbacks begin, as PowerSGD's do.
        """
        if _is_for_typed_hook(self._outputs):
            self.wait()
            return _typed(self.result())
        with _of_futures:
            is_first = self._future is None
            if is_first:
                self._is_complete = threading.Event()
                self._followers = []
                signal = self._signal = future_of(self._outputs)
                self._future = signal.then(self._value)
        if is_first:
            self.add_done_callback(Running._complete_future)
            if torch._C._current_graph_task_id() != _NO_GRAPH:
                Variable._execution_engine.queue_callback(self._end_backward)
            elif _in_callbacks.followers is not None:
                self._followers = _in_callbacks.followers
                self._followers.append(self)
        return self._future

    def _end_backward(self) -> None:
        """Called before DDP waits in C++."""
        self._wait_for_callbacks()
        while self._followers:
            self._followers.pop(0)._wait_for_callbacks()

    def _wait_for_callbacks(self) -> None:
        self.wait()
        if self._is_complete is not None:
            self._is_complete.wait()

    def _value(self, _: object) -> list[Any]:
        error = super().exception()
        if error is not None:
            raise error
        return self.result()

    def _complete_future(self) -> None:
        """Complete the future once the operation has ended, and only once."""
        if not super().is_completed():
            return
        with _of_futures:
            signal, self._signal = self._signal, None
        if signal is None or self._is_complete is None:
            return
        outer, _in_callbacks.followers = _in_callbacks.followers, self._followers
        try:
            signal.set_result(None)  # outside of the lock, because callbacks run in here
        finally:
            _in_callbacks.followers = outer
            self._is_complete.set()


@untraced
class RunningWork(Running, OneWork, dist.Work):
    """An operation that continues in the background."""

    def __init__(
        self,
        native: _native.Work,
        group: ProcessGroup,
        called: CallDetails,
        outputs: Sequence[Any],
        finish: Callable[[], None] | None = None,
    ) -> None:
        _init(self)
        OneWork.__init__(self, native, group, called, outputs, finish)

    def wait(self, timeout: timedelta | None = None) -> bool:
        # Most works are of this kind, and every step counts.
        is_plain = self._finish is None and self._signal is None and not timeout
        if is_plain and self._native.wait(-1.0) == 0 and self._unfinished is None:
            return True
        return super().wait(timeout)

    def source_rank(self) -> int:
        """For a completed receive: the sender's rank in the group."""
        return self.peer if self.operation == "irecv" else -1

    _source_rank = source_rank


@untraced
class RunningWorks(Running, ManyWorks, dist.Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Running], outputs: Sequence[Any]) -> None:
        _init(self)
        ManyWorks.__init__(self, works)
        self._outputs = outputs

    _source_rank = ManyWorks.source_rank


for _kind in (Running, OneWork, EngineWork, ManyWorks):
    untraced(_kind)


def joined(works: Sequence[dist.Work], outputs: Sequence[Any]) -> dist.Work:
    """Several works as one."""
    for work in works:
        if not isinstance(work, DoneWork | Running):
            work.wait()  # NCCL's, which makes the stream wait, not this thread
    running = [work for work in works if isinstance(work, Running)]
    return RunningWorks(running, outputs) if running else DoneWork(outputs)


def future_of(outputs: Sequence[Any]) -> Future[Any]:
    """A future that knows on which GPUs its value will be.

    Callbacks then run on streams on which waiters of the future wait too, as with NCCL.
    """
    gpus = {each.device for each in tensors_in(outputs) if each.is_cuda}
    return Future(devices=sorted(gpus, key=str)) if gpus else Future()


def _is_for_typed_hook(outputs: Sequence[Any]) -> bool:
    """Whether the caller is DDP's built-in hook for 16-bit floats, in C++, during backward.

    It accepts only what C++ recognises as a list of tensors, which a list from Python is not.
    """
    if not any(getattr(output, "dtype", None) is torch.float16 for output in outputs):
        return False
    # The caller of get_future: a hook in Python, or the caller of backward.
    caller = sys._getframe(1).f_back
    return caller is None or caller.f_globals.get("__name__", "").startswith("torch.autograd")


def _typed(outputs: list[Any]) -> Future[list[Any]]:
    """A completed future of what C++ recognises as a list of tensors.

    Only TorchScript creates one. Its futures for later would run on PyTorch's inter-op threads,
    which occasionally abort the process when it ends.
    """
    return torch._C.fork(_same().same, outputs)


@cache
def _same() -> torch.jit.CompilationUnit:
    return torch.jit.CompilationUnit(
        "def same(tensors: List[Tensor]) -> List[Tensor]:\n    return tensors\n"
    )
