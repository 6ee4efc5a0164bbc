"""A worker's link to its agent, each time in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

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
    out, _ = process.communicate(timeout=60)
    round_, took_s = out.split()
    return round_, float(took_s)


def test_a_wait_ends_in_time() -> None:
    process, ours = waiting(0.3)
    with ours:
        round_, took_s = told(process)
    assert round_ == "None"
    assert took_s >= 0.3


def test_a_wait_ends_with_a_newer_place() -> None:
    process, ours = waiting(60.0)
    with ours:
        ours.send(encode(Place(0, {})))  # the one that it has
        ours.send(encode(Place(3, {})))
        round_, took_s = told(process)
    assert round_ == "3"
    assert took_s < 30


def test_time_for_which_the_process_is_stopped_does_not_count() -> None:
    """It has been told when it goes on, but its thread that listens may be the later one."""
    several = [waiting(0.5) for _ in range(6)]
    for process, _ in several:
        os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.0)
    for process, _ in several:
        os.kill(process.pid, signal.SIGCONT)
    for process, ours in several:
        with ours:
            ours.send(encode(Place(1, {})))
            assert told(process)[0] == "1"
