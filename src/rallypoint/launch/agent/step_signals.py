"""Signals to the workers of a Slurm step, which Slurm may have signalled itself.

slurmstepd sends a signal (scancel, requeue, --signal, a time limit) to every process of a step,
whatever its session. If the agent forwarded it, a worker's handler would run twice. So the agent
holds a signal for a moment, and sends it only if Slurm did not. A probe detects this: a process
beside the workers that blocks all signals, so those sent to it stay pending. The moment also allows
for other nodes, which Slurm signals slightly earlier or later.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

HELD_S = 0.5
_PROGRAM = "/bin/cat"
_PENDING = b"ShdPnd:"  # in /proc/PID/status: a mask of signals, in hexadecimal


class SignalProbe:
    """The probe process. It ends when its input does, so it never outlives the agent."""

    def __init__(self) -> None:
        self._pid, self._input = 0, -1
        self._start()

    def saw(self, number: int) -> bool:
        """Whether it received that signal since the last time that this was true."""
        try:
            with open(f"/proc/{self._pid}/status", "rb") as file:
                lines = [line for line in file if line.startswith(_PENDING)]
        except OSError:
            return False
        was_sent = bool(lines) and bool(int(lines[0].split()[1], 16) >> (number - 1) & 1)
        if was_sent:  # nothing takes a pending signal away but a new process
            self.close()
            try:
                self._start()
            except OSError:  # then signals are passed on as without a probe
                self._pid, self._input = 0, -1
        return was_sent

    def close(self) -> None:
        """End it."""
        if self._input < 0:
            return
        os.close(self._input)
        try:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):  # someone else has reaped it
            return

    def _start(self) -> None:
        reading, self._input = os.pipe()
        nothing = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        try:
            self._pid = os.posix_spawn(
                _PROGRAM,
                ["cat"],
                {},
                file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0), *nothing],
                setpgroup=0,
                setsigmask=signal.valid_signals(),
            )
        except OSError:
            os.close(self._input)
            raise
        finally:
            os.close(reading)


class StepSignals:
    """The signals that the agent will send to its workers, unless Slurm has sent them.

    Args:
        send: sends a signal to these ranks.
    """

    def __init__(self, send: Callable[[tuple[int, ...], int], None]) -> None:
        self._send = send
        self._held: dict[int, tuple[float, tuple[int, ...]]] = {}  # by signal: until when, to whom
        self._probe = SignalProbe()

    @property
    def wake_at(self) -> float | None:
        """When to call `tick`; None: no signal is held."""
        return min((until for until, _ in self._held.values()), default=None)

    def send(self, ranks: tuple[int, ...], number: int, now: float) -> None:
        """Send it soon, unless Slurm does."""
        if number == signal.SIGCONT:  # harmless twice, and a suspended worker needs it
            self._send(ranks, number)
        else:
            self._held.setdefault(number, (now + HELD_S, ranks))

    def tick(self, now: float) -> None:
        """Time has passed."""
        for number, (until, ranks) in list(self._held.items()):
            if now >= until:
                del self._held[number]
                if not self._probe.saw(number):
                    self._send(ranks, number)

    def forget(self) -> None:
        """The ranks that it was for have ended."""
        self._held.clear()

    def close(self) -> None:
        """End the probe."""
        self._probe.close()
