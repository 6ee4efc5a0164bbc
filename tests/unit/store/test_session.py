"""A server that does not run for a while: a wait ends in its own time, and the connection lasts."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from rallypoint.base.errors import StoreConnectionError, StoreFencedError, StoreTimeoutError
from rallypoint.store import session as module
from rallypoint.store.connection import Connection
from rallypoint.store.session import Session
from rallypoint.store.wire import ErrorCode, Status, blob, u8

PATIENCE_S, PATIENT_S = 0.02, 30.0
CANCELED, REPLY, ERROR = (u8(each) for each in (Status.CANCELED, Status.REPLY, Status.ERROR))
NUMBER = struct.Struct("<q")


class Server:
    """The far end, which says only what a test has it say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_CANCEL_S", PATIENCE_S)
        self.socket, theirs = socket.socketpair()
        connection = Connection(theirs, "somewhere:1")
        connection.ours = True
        self.session = Session(connection, PATIENT_S)

    def add(self) -> int:
        """The next operation of the session."""
        return self.session.exchange_number("add", "n", b"add", NUMBER)

    def says(self, *data: bytes) -> None:
        self.socket.sendall(b"".join(data))

    def wait_in_vain(self, *, takes: bool = False) -> None:
        self.session.wait(*("wait", ["k"], b"wait", Connection.receive_u8, PATIENCE_S), takes=takes)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server(monkeypatch)
    yield server
    server.session.close()
    server.socket.close()


@pytest.mark.parametrize(
    "late",
    [
        CANCELED,
        REPLY + u8(0) + CANCELED,  # both were on their way
        ERROR + u8(ErrorCode.FENCED) + blob(b"round 3 is over") + CANCELED,
    ],
)
def test_a_late_reply_is_taken_by_the_next_operation(server: Server, late: bytes) -> None:
    with pytest.raises(StoreTimeoutError, match="does not answer either: check that it is still"):
        server.wait_in_vain()
    server.says(late, REPLY, NUMBER.pack(7))
    assert server.add() == 7
    assert server.socket.recv(99) == b"wait\x0cadd"
    server.says(REPLY, NUMBER.pack(8))
    assert server.add() == 8


def test_it_is_waited_for_as_long_as_for_the_next_operations_own(server: Server) -> None:
    with pytest.raises(StoreTimeoutError):
        server.wait_in_vain()
    server.session.timeout_s = 2 * PATIENCE_S
    with pytest.raises(StoreConnectionError, match=r"add of .n. .* no answer within 0\.04 s"):
        server.add()
    with pytest.raises(StoreConnectionError, match="the connection was closed or lost earlier"):
        server.add()


def test_waits_in_a_row_are_late_one_by_one(server: Server) -> None:
    """As those of a rank that waits for others in steps."""
    with pytest.raises(StoreTimeoutError):
        server.wait_in_vain()
    server.says(CANCELED)
    with pytest.raises(StoreTimeoutError):
        server.wait_in_vain()
    server.says(CANCELED, REPLY, NUMBER.pack(7))
    assert server.add() == 7


def test_a_server_that_answers_is_not_blamed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CANCEL_S", PATIENT_S)

    def answer() -> None:
        while b"\x0c" not in server.socket.recv(99):
            pass
        server.says(CANCELED)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(StoreTimeoutError, match="check the process that should have set it"):
        server.wait_in_vain()
    thread.join()


def test_what_a_late_reply_would_take_away_ends_the_connection(server: Server) -> None:
    with pytest.raises(StoreConnectionError, match=r"no answer within 0\.04 s"):
        server.wait_in_vain(takes=True)
    with pytest.raises(StoreConnectionError, match="open the store again"):
        server.add()


def test_an_error_that_is_not_late_is_raised(server: Server) -> None:
    server.says(ERROR, u8(ErrorCode.FENCED), blob(b"round 3 is over"))
    with pytest.raises(StoreFencedError, match="round 3 is over"):
        server.wait_in_vain()
