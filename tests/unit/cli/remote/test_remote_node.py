"""What node.py finds on its host before a launcher starts."""

from __future__ import annotations

import os
import select
import socket
import sys
from pathlib import Path

import pytest

from rallypoint.cli.remote.remote_node import StarterOrders, _look
from rallypoint.cli.remote.starter import ShellConnection


def look(directory: Path, script: str, port_range: str = "") -> str:
    order = {"directory": str(directory), "script": script, "port_range": port_range}
    held, found = _look(order)
    if held is not None:
        held.close()
    return str(found.get("error", ""))


def test_directory_and_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it is left there
    (tmp_path / "train.py").touch()
    assert look(tmp_path, "train.py") == ""
    assert look(tmp_path, "") == ""
    assert look(tmp_path, "other.py").startswith(f"there is no other.py in {tmp_path} there; ")
    assert look(tmp_path / "x", "train.py").startswith(f"cannot work in {tmp_path}/x there (No ")


def test_a_port_range_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RALLYPOINT_PORT_RANGE", "")  # it sets that
    with socket.create_server(("", 0)) as holder:
        port = holder.getsockname()[1]
        found = look(tmp_path, "", f"{port}-{port}")
    assert found.startswith("found no free port for the rendezvous: ")
    assert f"{port}-{port} is in use" in found


def test_an_input_that_ends_brings_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is closed or broken; what came before counts."""
    reader, writer = socket.socketpair()
    with reader, writer:
        saved = os.dup(0)
        os.dup2(reader.fileno(), 0)
        try:
            orders = StarterOrders()
            writer.sendall(b'{"signal": 2}\n{"sig')
            assert orders.wait() == {"signal": 2}
            writer.sendall(b'nal": 15}\n{"half')
            assert orders.wait() == {"signal": 15}
            writer.shutdown(socket.SHUT_WR)
            assert orders.wait() is None
            assert not orders.is_open
            again = StarterOrders()
            os.close(0)  # reading it is an error
            assert again.wait() is None
        finally:
            os.dup2(saved, 0)
            os.close(saved)


@pytest.mark.parametrize(
    ("program", "said", "told"),
    [
        ("exit 127", "sh: python: not found.\n", f"python: not found; {sys.executable} must exist"),
        ("exit 1", "No module named rallypoint\n", "install Rallypoint there as well, for "),
        ("exit 3", "", "sh ended with status 3"),
        ("kill -9 $$", "first\nlast\n", "last; sh ended with signal 9"),
    ],
)
def test_why_a_program_did_not_start(program: str, said: str, told: str) -> None:
    connection = ShellConnection("a", ["sh", "-c", program])
    select.select([connection.ended], [], [])
    connection.close()
    for descriptor in (connection.stdin, connection.stdout, connection.stderr):
        os.close(descriptor)
    assert told in connection.why(said)
