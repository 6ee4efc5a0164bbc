"""What /proc says of processes, beside what they are known to do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rallypoint.diagnosis.facts import Process
from rallypoint.launch.inspection.processes import Look


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
            time.sleep(0.1)
            yield process.pid
        finally:
            process.kill()


def look(pid: int) -> Process:
    before = Look([pid])
    time.sleep(0.3)
    return Look([pid]).processes(before)[pid]


def test_one_that_sleeps() -> None:
    with running("import time; time.sleep(60)") as pid:
        process = look(pid)
    assert process.state == "S"
    assert process.cpu < 0.2
    assert process.threads[0].syscall in ("clock_nanosleep", "nanosleep", "select", "pselect6")
    assert process.rss_bytes > 1 << 20
    assert 0 < process.age_s < 60


def test_one_that_computes() -> None:
    with running("while True: pass") as pid:
        process = look(pid)
    assert process.cpu + process.starved > 0.5  # others may want the cores, too


def test_one_that_is_stopped() -> None:
    with running("import time; time.sleep(60)") as pid:
        os.kill(pid, signal.SIGSTOP)
        assert look(pid).state == "T"


def test_one_that_opens_a_pipe_that_nobody_writes(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with running("import sys; open(sys.argv[1])", str(path)) as pid:
        thread = look(pid).threads[0]
    assert (thread.syscall, thread.path) == ("openat", str(path))


def test_one_that_reads_a_pipe_that_nobody_writes(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    program = "import os, sys; os.read(os.open(sys.argv[1], os.O_RDWR), 1)"
    with running(program, str(path)) as pid:
        thread = look(pid).threads[0]
    assert (thread.syscall, thread.path) == ("read", str(path))


def test_children_are_below_their_parents() -> None:
    program = "import subprocess; subprocess.run(['sleep', '60'])"
    with running(program) as pid:
        (child,) = look(pid).children
        assert child.command == "sleep 60"
        os.kill(child.pid, signal.SIGKILL)


def test_one_that_is_gone_is_left_out() -> None:
    with running("pass") as pid:
        before = Look([pid])
    assert Look([pid]).processes(before) == {}
