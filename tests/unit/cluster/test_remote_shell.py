"""What is said between this machine and a program on another one; over ssh: tests/system."""

from __future__ import annotations

import subprocess
import time

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cluster.remote_shell import (
    end,
    forwarded,
    greeting,
    last_lines,
    read_greeting,
    start,
    version_trouble,
)


def test_a_greeting_is_found_among_what_a_login_shell_says() -> None:
    line = greeting("we are", {"port": 7}).encode()
    found = read_greeting("we are", line)
    assert found is not None
    assert found["port"] == 7
    assert version_trouble(found) == ""
    assert read_greeting("we are", b"welcome to this host\n") is None


def test_another_version_is_refused() -> None:
    trouble = version_trouble({"version": "0.0.1"})
    assert trouble.startswith("it has Rallypoint 0.0.1, but this machine has ")
    assert trouble.endswith("; install the same version on all")


def test_the_end_of_what_was_said() -> None:
    assert last_lines("a\n\n b \n") == ["a", " b "]
    assert last_lines("".join(f"{number}\n" for number in range(20)))[0] == "8"


def test_variables_by_their_beginning() -> None:
    environ = {"NCCL_DEBUG": "1", "PYTHONPATH": "p", "HOME": "/", "MY_NCCL_": "2"}
    assert forwarded(environ, ("NCCL_", "PYTHON")) == {"NCCL_DEBUG": "1", "PYTHONPATH": "p"}


def test_what_is_started_is_ended() -> None:
    null = subprocess.DEVNULL
    process = start("a", ["sleep", "600"], stdin=null, stdout=null, stderr=null)
    end(process, time.monotonic())
    assert process.returncode == -9
    with pytest.raises(HostError, match=r"a: cannot run no-such-shell \(No such file"):
        start("a", ["no-such-shell"], stdin=null, stdout=null, stderr=null)
