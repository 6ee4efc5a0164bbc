"""Whether this process has been asked to end, and how long it has: for programs that save first.

Launchers and schedulers ask by a signal: SIGTERM, and whatever `--signals-to-handle` adds, such as
Slurm's early warning. A program that never calls `preempted` is ended by it, as ever.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

from rallypoint.base.errors import CallerError
from rallypoint.base.worker_env import SHUTDOWN_TIMEOUT, SHUTDOWN_TIMEOUT_S, SIGNALS

_LAUNCHED = "TORCHELASTIC_RUN_ID"
_JOB_END = "SLURM_JOB_END_TIME"  # seconds since 1970
# A terminal's: they end the program, and mean it.
_NOT_WATCHED = ("SIGINT", "SIGHUP", "SIGQUIT")


class _Watch:
    """Begins with the first question.

    Attributes:
        asked_at: when the first signal came, by the monotonic clock; None: none has.
        before: what handled each signal that is watched.
        mask: which signals were blocked before a fork.
    """

    def __init__(self) -> None:
        self.asked_at: float | None = None
        self.before: dict[int, Any] = {}
        self.mask: set[Any] = set()

    def begin(self) -> None:
        names = os.environ.get(SIGNALS, "").split(",")
        watched = {name.strip() for name in names} - {*_NOT_WATCHED} | {"SIGTERM"}
        try:
            for name in sorted(watched & signal.Signals.__members__.keys()):
                number = signal.Signals[name]
                self.before[number] = signal.getsignal(number)
                signal.signal(number, self.note)
        except ValueError:  # what Python says in any other thread
            self.before.clear()
            raise CallerError(
                "preempted() must first be called in the main thread, before the training begins:"
                " Python handles signals there only."
            ) from None

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.asked_at is None:
            self.asked_at = time.monotonic()
        handler = self.before[number]
        if callable(handler):  # a library's that was here first
            handler(number, frame)

    # A forked child, a data loader's worker say, is ended by a signal of its parent's, and has to
    # end. One that comes before it is no longer watched must not be lost, so it waits.

    def hold(self) -> None:
        """Before a fork."""
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, self.before)

    def go_on(self) -> None:
        """After it."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def end_in_child(self) -> None:
        """After it, in the child: as if nobody had asked."""
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
    """Whether this process has been asked to end, by its launcher or a scheduler.

    From the first call on, SIGTERM only makes this true, so that the program can save and leave;
    who stays is killed in the end (see `time_left`). So do other signals that
    `--signals-to-handle` names, such as SIGUSR1, but not those of a terminal (SIGINT, SIGHUP,
    SIGQUIT). Handlers that were set before the first call are still called.

    A signal does not reach all ranks between the same two steps, so let them decide together, by an
    all_reduce of this answer with ReduceOp.MAX in each step: else some wait for those who left.

    Returns:
        True from the first signal on.

    Raises:
        CallerError: the first call is not in the main thread.
    """
    if not _watch.before:
        _watch.begin()
    return _watch.asked_at is not None


def time_left() -> float | None:
    """For how many seconds this process may still run, if it was asked to end.

    Returns:
        Until the launcher kills it (`--shutdown-timeout` after the signal), or until a Slurm job's
        time is over, whichever is sooner; 0 if that is past. None: nobody has asked, or the time is
        not known here.
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
