"""The stand-in for ssh, with hosts that are this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.remote_shell import RemoteShell


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[RemoteShell]:
    # As with `nsenter`, another process is above the command.
    below = ["sh", "-c", '"$@"; exit $?', "nsenter"]
    host = SimpleNamespace(name="host1", enter=lambda *command: [*below, *command])
    hosts: Any = SimpleNamespace(hosts=[host])
    with RemoteShell(hosts, tmp_path) as made:
        yield made


def start(shell: RemoteShell, *words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*shell.command, *words], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.parametrize(
    ("words", "given", "expected"),
    [
        (["host1", "cat; pwd; exit 7"], "given\n", (7, "given\n/\n", "")),
        (["-x", "-q", "me@host1", "echo", "two", "words", ">&2"], "", (0, "", "two words\n")),
        (["host2", "true"], "", (255, "", "cannot resolve the name host2\n")),
    ],
)
def test_a_command_is_run(
    shell: RemoteShell, words: list[str], given: str, expected: tuple[int, str, str]
) -> None:
    process = start(shell, *words)
    out, err = process.communicate(given)
    assert (process.returncode, out, err) == expected


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """Also under nohup: what a shell was started to ignore, it does not trap."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangs_up")
def test_a_command_whose_client_ends_is_hung_up(shell: RemoteShell) -> None:
    """A connection on which nothing is said does not keep others from theirs."""
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(shell.command[-1])
    silent.close()
    script = "trap 'echo hung up; exit' HUP; echo begun; while :; do sleep 0.05; done"
    process = start(shell, "host1", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout.readline() == "hung up\n"
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()


def test_it_leaves_no_file(tmp_path: Path) -> None:
    hosts: Any = SimpleNamespace(hosts=[])
    with RemoteShell(hosts, tmp_path) as made:
        assert made.command[0] == sys.executable
        assert list(tmp_path.iterdir()) == [Path(made.command[-1])]
    assert list(tmp_path.iterdir()) == []
