"""Port ranges: what they mean, and what is told when all are taken."""

from __future__ import annotations

import socket

import pytest

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.base.port_range import VARIABLE, bind_free, read_port_range


@pytest.mark.parametrize("text", ["x", "1", "5-4", "0-3", "1-65536", "-", "3-", "-3", "1-2-3"])
def test_no_ranges(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="as in 20000-20999"):
        read_port_range(text)


def test_ranges() -> None:
    assert list(read_port_range("7-9")) == [7, 8, 9]
    assert list(read_port_range("")) == [0]


def test_free_ports_are_taken_until_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        monkeypatch.setenv(VARIABLE, f"{port}-{port + 1}")
        try:
            second = bind_free(lambda free: socket.create_server(("127.0.0.1", free)))
        except HostError:
            pytest.skip(f"someone else has port {port + 1}")
        with second:
            assert second.getsockname()[1] == port + 1
            with pytest.raises(HostError, match="all 2 ports"):
                bind_free(lambda free: socket.create_server(("127.0.0.1", free)))
