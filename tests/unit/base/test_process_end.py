"""The end of a process is seen with pidfds and without."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rallypoint.base import process_end as module
from rallypoint.base.process_end import ProcessEnd, is_running, start_of

WAY = ["pidfd", "refused", "missing"]


@pytest.fixture(params=WAY)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def pidfd_open(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if request.param == "refused":
        monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    elif request.param == "missing":  # as in a Python that was built without it
        monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(module, "_LOOK_S", 0.001)
    return str(request.param)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until its input ends."""
    program = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE) as process:
        yield process


def test_it_can_be_waited_for(way: str, child: subprocess.Popen[bytes]) -> None:
    end = ProcessEnd(child.pid)
    assert not end.wait(0)
    assert child.stdin is not None
    child.stdin.close()
    assert end.wait()
    assert end.wait(-1.0)  # again
    assert child.wait() == 0
    end.close()


def test_it_can_be_selected(way: str, child: subprocess.Popen[bytes]) -> None:
    end = ProcessEnd(child.pid)
    child.kill()
    assert select.select([end], [], []) == ([end], [], [])
    end.close()


def test_a_process_is_killed_and_no_other(way: str, child: subprocess.Popen[bytes]) -> None:
    end = ProcessEnd(child.pid)
    end.kill()
    assert child.wait() == -signal.SIGKILL
    end.kill()
    end.close()


def test_one_that_has_ended_and_is_not_reaped(way: str, child: subprocess.Popen[bytes]) -> None:
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    end = ProcessEnd(child.pid)
    assert end.wait()
    end.close()


def test_there_is_no_such_process(way: str, child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    with pytest.raises(ProcessLookupError):
        ProcessEnd(child.pid)


def test_a_process_is_told_from_a_later_one(child: subprocess.Popen[bytes]) -> None:
    start = start_of(child.pid)
    assert start is not None
    assert is_running(child.pid, start)
    assert not is_running(child.pid, b"1" + start)
    assert is_running(child.pid, b"")  # where it could not be seen
    child.kill()
    child.wait()
    assert start_of(child.pid) is None
    assert not is_running(child.pid, b"")


def test_without_proc_only_its_number_tells(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    start = start_of(child.pid)
    assert start
    monkeypatch.setattr(module, "_PROC", "/missing")
    assert start_of(child.pid) == b""
    assert is_running(child.pid, start)
    child.kill()
    child.wait()
    assert start_of(child.pid) is None


def test_a_process_of_another_user_runs(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.Popen[bytes]
) -> None:
    def kill(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(module, "_PROC", "/missing")
    monkeypatch.setattr(os, "kill", kill)
    assert is_running(child.pid, b"7")
