"""What /proc says of processes, beside what they are known to do, and sock_diag(7) of connections,
in the layout of linux/inet_diag.h and linux/tcp.h.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.diagnosis.facts import Process
from rallypoint.launch.inspection.processes import ProcessSample, _connection, waiting_flows

SLEEPS = ("clock_nanosleep", "nanosleep", "select", "pselect6")


@contextmanager
def running(program: str, *words: str) -> Iterator[int]:
    """A Python program, once it has said that it is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", f"print('ready', flush=True)\n{program}", *words],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def look(pid: int, for_s: float = 0.01) -> Process:
    before = ProcessSample([pid])
    time.sleep(for_s)
    return ProcessSample([pid]).processes(before)[pid]


def look_when(holds: Callable[[Process], bool], pid: int) -> Process:
    """Once that holds of the process."""
    while not holds(process := look(pid)):
        pass
    return process


def call_of(process: Process) -> tuple[str, str]:
    """The call of the system in which its main thread waits, and the file that it is for."""
    thread = process.threads[0]
    return thread.syscall, thread.path


def test_one_that_sleeps() -> None:
    with running("import time; time.sleep(600)") as pid:
        look_when(lambda process: process.state == "S" and call_of(process)[0] in SLEEPS, pid)
        process = look(pid)
    assert process.cpu < 0.2
    assert process.rss_bytes > 1 << 20
    assert 0 < process.age_s < 600


def test_one_that_wakes_again_and_again() -> None:
    """It never seems to sleep in no call, although it may run between two files that are read."""
    with running("import time\nwhile True: time.sleep(0.0005), sum(range(9999))") as pid:
        seen = [look(pid, for_s=0.0).threads[0] for _ in range(300)]
    assert {"R" if each.state == "R" else each.syscall for each in seen} <= {"R", *SLEEPS}


def test_one_that_computes() -> None:
    """What it waited for a core counts once it has got one."""
    with running("while True: pass") as pid:
        process = look(pid, 0.2)
        while process.cpu + process.starved <= 0.5:
            process = look(pid, 0.2)


def test_one_that_is_stopped() -> None:
    with running("import time; time.sleep(600)") as pid:
        os.kill(pid, signal.SIGSTOP)
        look_when(lambda process: process.state == "T", pid)


def test_one_that_opens_a_pipe_that_nobody_writes(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with running("import sys; open(sys.argv[1])", str(path)) as pid:
        look_when(lambda process: call_of(process) == ("openat", str(path)), pid)


def test_one_that_reads_a_pipe_that_nobody_writes(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    program = "import os, sys; os.read(os.open(sys.argv[1], os.O_RDWR), 1)"
    with running(program, str(path)) as pid:
        look_when(lambda process: call_of(process) == ("read", str(path)), pid)


def test_children_are_below_their_parents() -> None:
    program = "import subprocess; subprocess.run(['sleep', '600'])"
    with running(program) as pid:
        process = look_when(lambda process: "sleep 600" in commands(process), pid)
        (child,) = process.children
        os.kill(child.pid, signal.SIGKILL)


def commands(process: Process) -> list[str]:
    return [child.command for child in process.children]


def test_one_that_is_gone_is_left_out() -> None:
    with running("pass") as pid:
        before = ProcessSample([pid])
    assert ProcessSample([pid]).processes(before) == {}


def message(peer: str, *, waiting: int, again: int, data_ms: int, acknowledged_ms: int) -> bytes:
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    address = socket.inet_pton(family, peer).ljust(16, b"\0")
    told = struct.pack("=BBBB", family, 1, 0, 0)
    told += struct.pack(">HH", 40000, 50000) + bytes(16) + address
    told += struct.pack("=IQ", 0, 77)
    told += struct.pack(
        "=IIIII", 200, 0, waiting, 1000, 4711
    )  # expires, rqueue, wqueue, uid, inode
    told += struct.pack("=HH", 8, 1) + bytes(4)  # another attribute comes first
    info = struct.pack("=BBBBBBBB", 1, 0, again, 0, 0, 0, 0, 0) + struct.pack("=9I", *[9] * 9)
    info += struct.pack("=4I", 5, 0, data_ms, acknowledged_ms) + bytes(40)
    return told + struct.pack("=HH", 4 + len(info), 2) + info


@pytest.mark.parametrize("peer", ["10.77.0.2", "fd00::2"])
def test_a_connection_in_which_data_wait(peer: str) -> None:
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    told = message(peer, waiting=640, again=3, data_ms=9000, acknowledged_ms=4200)
    found = _connection(told, family)
    assert found is not None
    assert (found.inode, found.peer, found.unacknowledged_bytes) == (4711, peer, 640)
    assert (found.retransmits, found.silent_s) == (3, 4.2)
    assert _connection(told[:100], family) is None


def test_peers_on_this_host_are_left_out() -> None:
    for family, peer in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")):
        told = message(peer, waiting=1, again=1, data_ms=9, acknowledged_ms=9)
        assert _connection(told, family) is None
    mapped = message("::ffff:10.0.0.9", waiting=1, again=1, data_ms=9, acknowledged_ms=9)
    found = _connection(mapped, socket.AF_INET6)
    assert found is not None
    assert found.peer == "10.0.0.9"


def test_the_kernel_is_understood_here() -> None:
    assert waiting_flows({os.getpid(): 0, 2**22 + 1: 1}) == ()
