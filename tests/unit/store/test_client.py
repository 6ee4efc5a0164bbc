"""TCPStore: its server in the same process, and what it says if there is none."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from rallypoint.base.errors import StoreConnectionError, StoreTimeoutError
from rallypoint.store import client
from rallypoint.store.client import TCPStore

TIMEOUT = timedelta(seconds=60)


def test_masters_of_one_process_can_share_a_server() -> None:
    first = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, multi_tenant=True)
    second = TCPStore("127.0.0.1", first.port, None, True, TIMEOUT, multi_tenant=True)
    first.set("k", "v")
    assert second.get("k") == b"v"
    first.close()
    assert second.get("k") == b"v"
    second.close()
    with pytest.raises(StoreConnectionError):
        TCPStore("127.0.0.1", first.port, timeout=timedelta(seconds=0.2))


def test_a_missing_server_is_an_error_within_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens there, or can begin to
        port = silent.getsockname()[1]
        with pytest.raises(StoreConnectionError, match=f"127.0.0.1:{port} within 0.3 s"):
            TCPStore("127.0.0.1", port, timeout=timedelta(seconds=0.3))


class FastClock:
    """Every look at it takes half a minute."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def monotonic(self) -> float:
        self._now_s += 30
        return self._now_s

    def sleep(self, _: float) -> None:
        pass


def test_the_master_says_how_many_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "time", FastClock())
    with pytest.raises(StoreTimeoutError, match="1 of 3 clients joined"):
        TCPStore("127.0.0.1", 0, 3, True, TIMEOUT)
