"""A server that does not run for a while: its answers are waited for, and the connection lasts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from rallypoint.base.errors import StoreConnectionError, StoreTimeoutError
from rallypoint.store import session as module
from rallypoint.store.connection import Connection
from rallypoint.store.session import Session
from rallypoint.store.wire import Status, u8

WAIT_S, CANCEL_S, PATIENT_S = 0.02, 0.04, 30.0


class Server:
    """The far end, which says only what a test has it say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_CANCEL_S", CANCEL_S)
        self.socket, theirs = socket.socketpair()
        connection = Connection(theirs, "somewhere:1")
        connection.ours = True
        self.session = Session(connection, PATIENT_S)

    def wait_in_vain(self) -> None:
        self.session.wait("wait", ["k"], b"wait", Connection.receive_u8, WAIT_S)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(monkeypatch)
    yield server
    server.session.close()
    server.socket.close()


def test_an_answer_to_the_end_of_a_wait_may_take_as_long_as_any_other(server: Server) -> None:
    def answer() -> None:
        while b"\x0c" not in server.socket.recv(99):
            pass
        late.wait(3 * CANCEL_S)
        server.socket.sendall(u8(Status.CANCELED))

    late = threading.Event()
    for _ in range(2):  # as those of a rank that waits for others in steps
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(StoreTimeoutError, match="check the process that should have set it"):
            server.wait_in_vain()
        thread.join()


def test_the_error_says_how_long_it_has_waited(server: Server) -> None:
    server.session.timeout_s = 3 * CANCEL_S
    with pytest.raises(StoreConnectionError, match=r"wait of .k. .* no answer within 0\.14 s"):
        server.wait_in_vain()
    with pytest.raises(StoreConnectionError, match="the connection was closed or lost earlier"):
        server.wait_in_vain()
