"""StoreServer: who is turned away, and what it says about a port that is taken; tokens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.store_twin.messages import Request, encode_request

from rallypoint import _native
from rallypoint.base.errors import InvalidArgumentError, StoreConnectionError
from rallypoint.store import wire
from rallypoint.store.server import StoreServer
from rallypoint.store.token import read_token
from rallypoint.store.wire import Opcode


def test_a_silent_client_is_closed_after_a_while() -> None:
    machine = _native.StoreMachine()
    silent, polite = machine.open(100.0), machine.open(100.0)
    greeting = encode_request(Request(Opcode.VALIDATE, number=wire.MAGIC))
    assert machine.receive(polite, greeting) is None
    assert machine.late(129.9) == []
    assert machine.late(130.0) == [silent]


def test_a_port_in_use_names_its_holder() -> None:
    with (
        StoreServer(log_fd=-1) as server,
        pytest.raises(
            StoreConnectionError, match=rf":{server.port} \(it is in use by process {os.getpid()} "
        ),
    ):
        StoreServer(port=server.port, log_fd=-1)


def test_a_token_file_that_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(" \n")
    with pytest.raises(InvalidArgumentError, match=f"the token file {path} is empty; write a long"):
        read_token(str(path))
    path.write_text(" open sesame\n")
    assert read_token(str(path)) == b"open sesame"


def test_an_empty_token() -> None:
    with pytest.raises(InvalidArgumentError, match="the store's token is empty; pass None for no"):
        StoreServer(token=b"")
