"""Port ranges: what they mean, and what is told when all are taken."""

from __future__ import annotations

import errno
import os

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
    taken = {7}

    def bind(port: int) -> int:
        if port in taken:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        taken.add(port)
        return port

    monkeypatch.setenv(VARIABLE, "7-8")
    assert bind_free(bind) == 8
    with pytest.raises(HostError, match="all 2 ports"):
        bind_free(bind)
