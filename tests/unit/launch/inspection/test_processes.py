"""What /proc says of processes, beside what they are known to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rallypoint.diagnosis.facts import Process
from rallypoint.launch.inspection.processes import Look

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
    before = Look([pid])
    time.sleep(for_s)
    return Look([pid]).processes(before)[pid]


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
        before = Look([pid])
    assert Look([pid]).processes(before) == {}
