"""Signals to the agent, as events of its loop."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable, Sequence
from types import FrameType

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.launch.output.terminal import say

FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def read_signals(text: str, name: str) -> tuple[str, ...]:
    """The names in ``"SIGTERM,SIGUSR1"``; `name` is the user's name of the list."""
    names = tuple(each.strip() for each in text.split(","))
    for each in names:
        if each not in signal.Signals.__members__ or each in ("SIGKILL", "SIGSTOP", "SIGCHLD"):
            raise InvalidArgumentError(
                f"{name}: {each!r} is not a signal that a program can handle; give names such as "
                "SIGTERM,SIGUSR1."
            )
    return names


class Signals:
    """While in force, stop signals and those to forward arrive as events of the loop."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        callback: Callable[[int], None],
        stop_signals: Sequence[str],
    ) -> None:
        self._callback = callback
        self._stop_signals = [signal.Signals[name] for name in stop_signals]
        self._selector = selector
        self._before: dict[int, object] = {}
        self._is_in_force = False

    def __enter__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        except ValueError:
            # Not the main thread: Python would call no handler. As torch, launch anyway.
            self._close()
            say(
                "launched from a thread other than the main one: signals are not forwarded to the "
                "workers"
            )
            return
        self._is_in_force = True
        self._selector.register(self._reading, selectors.EVENT_READ, self._read)
        for number in (*self._stop_signals, *FORWARDED):
            # nohup ignores SIGHUP, and means the job too.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, _note)

    def __exit__(self, *_: object) -> None:
        if not self._is_in_force:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._close()

    def _close(self) -> None:
        os.close(self._reading)
        os.close(self._writing)

    def _read(self) -> None:
        for number in os.read(self._reading, 4096):
            self._callback(number)


def _note(_number: int, _frame: FrameType | None) -> None:
    """Does nothing; but without a handler Python would not write to the wakeup descriptor."""
