"""What keeps a client from connecting, however often it tries, is told at once."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from rallypoint.base.errors import StoreConnectionError, SystemCallError
from rallypoint.store import connection
from rallypoint.store.connection import connect

FOR_EVER_S = 1e6


def fail(monkeypatch: pytest.MonkeyPatch, where: object, name: str, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(where, name, refuse)


def test_a_process_without_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, connection, "_Socket", errno.EMFILE)
    with pytest.raises(SystemCallError, match="ran out of file descriptors"):
        connect("127.0.0.1", 9, FOR_EVER_S)


def test_a_loopback_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, socket.socket, "connect", errno.ENETUNREACH)
    monkeypatch.setattr(connection, "loopback_trouble", lambda _: "lo is down; start it")
    with pytest.raises(StoreConnectionError) as info:
        connect("127.0.0.1", 9, FOR_EVER_S)
    assert str(info.value) == "the store at 127.0.0.1:9 cannot be reached: lo is down; start it"


@pytest.mark.parametrize("number", [errno.ECONNREFUSED, errno.ENETUNREACH])
def test_others_may_come_up(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A server that is starting, a route."""
    fail(monkeypatch, socket.socket, "connect", number)
    monkeypatch.setattr(connection, "loopback_trouble", lambda _: "")
    with pytest.raises(StoreConnectionError, match="no store answered at"):
        connect("127.0.0.1", 9, 0.0)
