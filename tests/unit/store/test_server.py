"""StoreServer: who is turned away, and what it says about a port that is taken."""

from __future__ import annotations

import os

import pytest
from tests.store_twin.messages import Request, encode_request

from rallypoint import _native
from rallypoint.base.errors import StoreConnectionError
from rallypoint.store import wire
from rallypoint.store.server import StoreServer
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
