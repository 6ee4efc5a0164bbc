"""What is said between this machine and a program on another one; over ssh: tests/system."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cluster.remote_shell import (
    OrderLink,
    ShellLink,
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


# Orders to a program at the other end of a connection, which here is a shell on this machine.


@contextmanager
def link_to(script: str) -> Iterator[ShellLink]:
    link = ShellLink("host1", ["sh", "-c", script])
    yield link
    link.close()
    link.end(time.monotonic() + 60)


def test_orders_and_answers() -> None:
    """What a login shell prints before the greeting does not matter."""
    script = """echo welcome; echo 'we are {"port": 7}'; read order; echo "[$order]" """
    with link_to(script) as link:
        link.greet("we are")
        assert link.found == {"port": 7}
        link.tell({"do": "x"})
        select.select([link], [], [])
        assert link.read() == [{"do": "x"}]  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo out of memory >&2; echo half | tr -d '\\n'", "the connection ended: sh -c "),
        ("exec sleep 60 </dev/null", "no answer within 0.05 s: sh -c "),
    ],
)
def test_an_answer_that_does_not_come(script: str, message: str) -> None:
    link = ShellLink("host1", ["sh", "-c", script])
    with pytest.raises(HostError) as raised:
        link.read(0.05 if "sleep" in script else 60.0)
    assert str(raised.value).startswith(f"host1: {message}")
    assert ("\n  | out of memory" in str(raised.value)) == ("memory" in script)
    link.tell({"do": "x"})  # nobody reads it, which the next answer would tell
    link.close()
    link.end(time.monotonic())


def test_a_program_that_does_not_leave_is_killed() -> None:
    link = ShellLink("host1", ["sh", "-c", "echo; exec sleep 60"])
    select.select([link], [], [])
    link.close()
    link.end(time.monotonic())
    assert link._process.returncode == -9


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(HostError, match="host1: cannot run no-such-shell"):
        ShellLink("host1", ["no-such-shell"])


def test_a_connection_to_a_program_that_runs_already() -> None:
    ours, theirs = socket.socketpair()
    link = OrderLink("host1", ours)
    theirs.sendall(b'{"time": 7}\n')
    assert link.ask({"do": "x"}, 60.0) == {"time": 7}
    assert json.loads(theirs.recv(100)) == {"do": "x"}
    with pytest.raises(HostError, match=r"^no reply in time$"):
        link.read(0.01)
    link.close()
    assert theirs.recv(100) == b""
    theirs.close()
    link.end(time.monotonic())


@pytest.mark.parametrize("said", [b"", b"{", b"what?\n"])
def test_a_connection_that_ends(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(said)
    link = OrderLink("host1", ours)
    with pytest.raises(HostError, match=r"^the connection ended$"):
        link.ask({"do": "x"}, 60.0)
    link.end(time.monotonic())
