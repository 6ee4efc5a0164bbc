"""Names that are slow, unknown or moved; the name service is a function of the test."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cluster import names as module
from rallypoint.cluster import network
from rallypoint.cluster.interface import own_address
from rallypoint.cluster.names import Names


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.1)
    monkeypatch.setattr(module, "_LONGEST_PAUSE_S", 0.4)


def answered(names: Names) -> list[str]:
    assert select.select([names], [], [], 10)[0]
    return names.take()


def test_a_slow_name_service_keeps_nobody_waiting() -> None:
    is_slow = threading.Event()

    def look_up(_: str) -> list[str]:
        is_slow.wait(10)
        return ["192.0.2.1"]

    names = Names(look_up)
    began = time.monotonic()
    assert names.address_of("host") is None
    assert names.address_of("host") is None
    assert names.address_of("192.0.2.9") == "192.0.2.9"
    assert names.take() == []
    assert time.monotonic() - began < 5
    is_slow.set()
    assert answered(names) == ["host"]
    assert names.address_of("host") == "192.0.2.1"
    names.close()


def test_a_host_that_moves_is_found_and_the_service_is_not_flooded() -> None:
    asked: list[float] = []
    now_at = ["192.0.2.1", "192.0.2.2"]

    def look_up(_: str) -> list[str]:
        asked.append(time.monotonic())
        return list(now_at)

    names = Names(look_up)
    assert names.address_of("host") is None
    answered(names)
    assert names.address_of("host") == "192.0.2.1"
    names.failed("host")
    assert names.address_of("host") == "192.0.2.2"  # each address is tried first
    names.failed("host")
    now_at[:] = ["192.0.2.7"]
    deadline = time.monotonic() + 10
    while names.address_of("host") != "192.0.2.7":
        if select.select([names], [], [], 0.01)[0]:
            names.take()
        assert time.monotonic() < deadline
    for _ in range(100):  # nobody answers any more, and calls go on for a second
        names.failed("host")
        names.address_of("host")
        time.sleep(0.01)
        names.take()
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert min(pauses) >= 0.1
    assert min(pauses[3:], default=0.4) >= 0.4
    names.close()


def test_an_unknown_name_is_an_error_until_it_is_known() -> None:
    known: list[str] = []

    def look_up(host: str) -> list[str]:
        if not known:
            raise HostError(f"cannot find the host {host!r}")
        return known

    names = Names(look_up)
    assert names.address_of("host") is None
    answered(names)
    with pytest.raises(HostError, match="cannot find the host 'host'"):
        names.address_of("host")
    known.append("192.0.2.3")
    deadline = time.monotonic() + 10
    found = None
    while found is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        names.take()
        try:
            found = names.address_of("host")
        except HostError:
            continue
    assert found == "192.0.2.3"
    names.close()


def test_own_names_need_no_name_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 192.0.2.53\nsearch jobs.example. example\n")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked a name service")

    monkeypatch.setattr(network, "_RESOLVER", str(resolver))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    name = os.uname().nodename
    assert network.is_here(name.upper())
    assert network.is_here(f"{name}.jobs.example")
    assert network.is_here(f"{name}.Example")
    assert network.is_here("node7.alias", "node7.alias")
    with pytest.raises(AssertionError):
        network.is_here(f"{name}.elsewhere")


def test_a_name_as_local_addr() -> None:
    assert own_address("127.0.0.1", "localhost") == "127.0.0.1"
