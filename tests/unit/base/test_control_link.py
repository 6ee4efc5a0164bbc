"""A worker's link to its agent; what a real clock ends, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from rallypoint.base import control_link
from rallypoint.base.control_link import ControlLink
from rallypoint.base.control_message import Place, encode

WAIT = """
import sys, time
from rallypoint.base.control_link import ControlLink
link = ControlLink(int(sys.argv[1]))
print("waits", flush=True)
began = time.monotonic()
place = link.wait(0, float(sys.argv[2]))
print(place and place.round, time.monotonic() - began)
"""


def waiting(seconds: float) -> tuple[subprocess.Popen[str], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", WAIT, str(theirs.fileno()), str(seconds)],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    return process, ours


def told(process: subprocess.Popen[str]) -> tuple[str, float]:
    out, _ = process.communicate()
    round_, took_s = out.split()
    return round_, float(took_s)


def test_a_wait_ends_in_time() -> None:
    process, ours = waiting(0.3)
    with ours:
        round_, took_s = told(process)
    assert round_ == "None"
    assert took_s >= 0.3


def test_a_wait_ends_with_a_newer_place() -> None:
    process, ours = waiting(600.0)
    with ours:
        ours.send(encode(Place(0, {})))  # the one that it has
        ours.send(encode(Place(3, {})))
        round_, _ = told(process)
    assert round_ == "3"


class Clock(threading.Condition):
    """A wait takes what it is given, except for one during which the process is stopped."""

    def __init__(self, *, stopped_in: int) -> None:
        super().__init__()
        self._now = 0.0
        self._stopped_in = stopped_in
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self._now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self._now += 9.0 if len(self.waits) == self._stopped_in else timeout
        self.waits.append(timeout)
        return False


def test_time_for_which_the_process_is_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has been told when it goes on, but its thread that listens may be the later one."""
    clock, listener = Clock(stopped_in=1), SimpleNamespace(start=lambda: None)
    threads = SimpleNamespace(Condition=lambda: clock, Thread=lambda **_: listener)
    monkeypatch.setattr(control_link, "time", clock)
    monkeypatch.setattr(control_link, "threading", threads)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        link = ControlLink(theirs.fileno())
        with link._socket:
            assert link.wait(0, 2.5) is None
    assert clock.waits == [1.0, 1.0, 1.0, 1.0, 0.5]
