"""Tells a program that it has been asked to end, and how much time it has left to save its state.

Launchers and schedulers ask with a signal: SIGTERM, and those that `--signals-to-handle` adds, such
as Slurm's early warning. A program that never calls `preempted` is ended by the signal, as usual.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

from rallypoint.base.errors import CallerError
from rallypoint.base.worker_env import SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S, SIGNALS

Handler = Callable[[int, FrameType | None], object] | int | None
_LAUNCHED = "TORCHELASTIC_RUN_ID"
_JOB_END = "SLURM_JOB_END_TIME"  # seconds since 1970
# Signals from a terminal: they must end the program.
_NOT_WATCHED = ("SIGINT", "SIGHUP", "SIGQUIT")


class _Watch:
    """The signal handlers, installed by the first call of `preempted`.

    The first signal came at `asked_at`, by the monotonic clock. `before` has the previous handlers,
    and `mask` the signals that were blocked before a fork.
    """

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.before: dict[int, Handler] = {}
        self.mask: set[int | signal.Signals] = set()

    def begin(self) -> None:
        names = os.environ.get(SIGNALS, "").split(",")
        watched = {name.strip() for name in names} - {*_NOT_WATCHED} | {"SIGTERM"}
        try:
            for name in sorted(watched & signal.Signals.__members__.keys()):
                number = signal.Signals[name]
                self.before[number] = signal.getsignal(number)
                signal.signal(number, self.note)
        except ValueError:  # not in the main thread
            self.before.clear()
            raise CallerError(
                "preempted() must first be called in the main thread, before the training begins:"
                " Python handles signals there only."
            ) from None

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        handler = self.before[number]
        if callable(handler):  # set by a library
            handler(number, frame)

    # A forked child, such as a data loader's worker, must end when its parent signals it. A signal
    # that arrives before the child has restored its handlers stays blocked, so that it is not lost.

    def hold(self) -> None:
        """Before a fork."""
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.before)

    def go_on(self) -> None:
        """After it."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def end_in_child(self) -> None:
        """After it, in the child: as if no preemption had been requested."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before.clear()
        self.asked_at = None
        self.go_on()


_watch = _Watch()
os.register_at_fork(
    before=_watch.hold, after_in_parent=_watch.go_on, after_in_child=_watch.end_in_child
)


def preempted() -> bool:
    """Return whether the launcher or a scheduler has asked this process to end.

    After the first call, SIGTERM no longer ends the process; it makes this function return True, so
    that the program can save its state and exit. A process that does not exit is killed when its
    time is up (see `time_left`). The same holds for the signals in `--signals-to-handle`, such as
    SIGUSR1, except those of a terminal (SIGINT, SIGHUP, SIGQUIT). Handlers that were set before the
    first call are still called.

    Ranks receive the signal in different steps. To stop in the same step, reduce this value over
    all ranks in each step, with all_reduce and ReduceOp.MAX; otherwise some ranks wait for those
    that have exited.

    Returns:
        True once a signal has arrived.

    Raises:
        CallerError: the first call was not made in the main thread.
    """
    if not _watch.before:
        _watch.begin()
    return _watch.asked_at is not None


def time_left() -> float | None:
    """Return how many seconds this process may still run after it was asked to end.

    Returns:
        The time until the launcher kills it (`--shutdown-timeout` after the signal) or until the
        Slurm job ends, whichever comes first; never negative. None if it was not asked to end, or
        if the time is unknown.
    """
    if _watch.asked_at is None:
        return None
    ends = []
    if os.environ.get(_LAUNCHED):
        ends.append(_watch.asked_at - time.monotonic() + _shutdown_timeout_s())
    if os.environ.get(_JOB_END, "").isdecimal():
        ends.append(int(os.environ[_JOB_END]) - time.time())
    return max(0.0, min(ends)) if ends else None


def _shutdown_timeout_s() -> float:
    try:
        return float(os.environ[SHUTDOWN_TIMEOUT])
    except (KeyError, ValueError):
        return SHUTDOWN_TIMEOUT_S
