"""The worker's end of the control socket, each time in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.base.control_message import Hello, Message, WorkerError, decode, encode


def run_worker(
    code: str, *arguments: str, how: tuple[str, ...] = ("-c",)
) -> tuple[subprocess.CompletedProcess[str], list[Message]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            done = subprocess.run(
                [sys.executable, *how, code, *arguments],
                env={**os.environ, "RALLYPOINT_CONTROL_FD": str(theirs.fileno())},
                pass_fds=[theirs.fileno()],
                capture_output=True,
                text=True,
                check=False,
            )
        messages = []
        while packet := ours.recv(1 << 20):
            messages.append(decode(packet))
    return done, messages


def run_plain(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def only_error(messages: list[Message]) -> WorkerError:
    assert isinstance(messages[0], Hello)
    (error,) = messages[1:]
    assert isinstance(error, WorkerError)
    return error


def test_the_greeting_is_what_encode_makes() -> None:
    code = "import os; print(os.getpid())"
    done, messages = run_worker(code)
    assert messages == [Hello(int(done.stdout))]
    # decode reads this exact form without json; the hook writes it without json.
    assert encode(Hello(7)) == b'{"v": 1, "kind": "hello", "pid": %d}' % 7


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("raise ValueError('bad thing')", "ValueError", "bad thing"),
        ("class Mine(Exception): pass\nraise Mine()", "Mine", ""),
        ("import json; json.loads('x')", "json.decoder.JSONDecodeError", "Expecting value"),
        ("1/0", "ZeroDivisionError", "division by zero"),
        ("def f(): f()\nf()", "RecursionError", "maximum recursion depth"),
        ("this is no python", "SyntaxError", "invalid syntax"),
    ],
)
def test_an_exception_is_reported_and_printed_as_ever(code: str, kind: str, message: str) -> None:
    done, messages = run_worker(code)
    error = only_error(messages)
    assert error.type == kind
    assert message in error.message
    assert "Traceback" in error.traceback or kind == "SyntaxError"
    assert error.traceback.rstrip().splitlines()[-1].startswith(kind.rpartition(".")[0] or kind[:4])
    assert not error.is_echo
    plain = run_plain(code)
    assert (done.returncode, done.stdout, done.stderr) == (1, plain.stdout, plain.stderr)


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)", "import os; os._exit(4)"])
def test_no_exception_no_report(code: str) -> None:
    _, messages = run_worker(code)
    assert len(messages) == 1


@pytest.mark.parametrize("code", ["pass", "raise SystemExit(3)", "import sys; del sys.argv[:]"])
@pytest.mark.parametrize("name", ["script.py", "package/__main__.py"])
def test_a_script_that_ends_is_not_taken_for_missing(code: str, name: str, tmp_path: Path) -> None:
    script = tmp_path / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(code)
    path = script.parent if script.name == "__main__.py" else script
    _, messages = run_worker(str(path), how=())
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("how", "name", "kind"),
    [
        ((), "missing.py", "FileNotFoundError"),
        (("-m",), "no_such_module", "ModuleNotFoundError"),
        ((), "", "FileNotFoundError"),  # a directory without __main__.py
    ],
)
def test_a_missing_program_is_reported(
    how: tuple[str, ...], name: str, kind: str, tmp_path: Path
) -> None:
    done, messages = run_worker(name if how else str(tmp_path / name), how=how)
    error = only_error(messages)
    assert (error.type, error.is_startup) == (kind, True)
    assert done.returncode != 0


def test_the_programs_own_hook_still_runs_and_is_still_reported() -> None:
    code = "import sys\nsys.excepthook = lambda *_: print('mine')\nraise ValueError('x')"
    done, messages = run_worker(code)
    assert only_error(messages).type == "ValueError"
    assert done.stdout == "mine\n"
    assert done.stderr == ""


ECHO = "from rallypoint.base.errors import PeerLostError\n"


@pytest.mark.parametrize(
    "code",
    [
        ECHO + "raise PeerLostError('rank 1 died')",
        ECHO + "try:\n raise PeerLostError('x')\nexcept Exception as e:\n raise KeyError() from e",
        ECHO + "try:\n raise PeerLostError('x')\nfinally:\n {}['k']",
        "raise RuntimeError('[pair.cc:1] Connection closed by peer [127.0.0.1]:1')",
    ],
)
def test_the_loss_of_a_peer_is_an_echo(code: str) -> None:
    assert only_error(run_worker(code)[1]).is_echo


def test_children_do_not_inherit_the_role() -> None:
    code = """
import os, subprocess, sys
assert "RALLYPOINT_CONTROL_FD" not in os.environ
assert "RALLYPOINT_FLIGHT_RECORD" not in os.environ
subprocess.run([sys.executable, "-c", "raise ValueError('child')"])
if os.fork() == 0:
    raise ValueError("fork")
os.wait()
print(sys.argv, __name__)
"""
    done, messages = run_worker(code, "a", "--b")
    assert len(messages) == 1
    assert done.stdout == "['-c', 'a', '--b'] __main__\n"


@pytest.mark.parametrize("value", ["", "x", "999", "-1", "1"])
def test_a_wrong_descriptor_breaks_nothing(value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "print('fine')"],
        env={**os.environ, "RALLYPOINT_CONTROL_FD": value},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


def test_an_agent_that_does_not_read_stops_nobody() -> None:
    code = """
import sys
for _ in range(500):
    sys.excepthook(ValueError, ValueError("x" * 4000), None)
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RALLYPOINT_CONTROL_FD": str(theirs.fileno())},
            pass_fds=[theirs.fileno()],
            stderr=subprocess.DEVNULL,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("code", "is_startup"),
    [
        ("import no_such_module", True),
        ("from os import no_such_name", True),
        ("exec('def broken(:')", True),
        ("def work(): import no_such_module\nwork()", False),
        ("import runpy; runpy.run_module('no_such_module')", True),
        ("raise ValueError()", False),
        ("open('/no/such/file')", False),
    ],
)
def test_a_failure_before_the_programs_own_work_is_marked(code: str, is_startup: bool) -> None:
    _, messages = run_worker(code)
    assert only_error(messages).is_startup == is_startup
