"""Names that are slow, unknown or moved; the name service is a function of the test."""

from __future__ import annotations

import os
import select
import socket
import threading
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cluster import names as module
from rallypoint.cluster import network
from rallypoint.cluster.names import Names
from rallypoint.cluster.network import choose_network


class Clock:
    """The time, which passes only when a test says so."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def answered(names: Names) -> list[str]:
    select.select([names], [], [])
    return names.take()


def test_a_slow_name_service_keeps_nobody_waiting() -> None:
    may_answer = threading.Event()

    def look_up(_: str) -> list[str]:
        may_answer.wait()
        return ["192.0.2.1"]

    names = Names(look_up)
    assert names.address_of("host") is None
    assert names.address_of("host") is None
    assert names.address_of("192.0.2.9") == "192.0.2.9"
    assert names.take() == []
    may_answer.set()
    assert answered(names) == ["host"]
    assert names.address_of("host") == "192.0.2.1"
    names.close()


def test_a_host_that_moves_is_found_and_the_service_is_not_flooded(clock: Clock) -> None:
    asked: list[float] = []
    now_at = ["192.0.2.1", "192.0.2.2"]

    def look_up(_: str) -> list[str]:
        asked.append(clock.now)
        return list(now_at)

    names = Names(look_up)
    assert names.address_of("host") is None
    answered(names)
    assert names.address_of("host") == "192.0.2.1"
    names.failed("host")
    assert names.address_of("host") == "192.0.2.2"  # each address is tried first
    names.failed("host")
    now_at[:] = ["192.0.2.7"]
    clock.now = 0.9
    assert names.address_of("host") == "192.0.2.1"  # as far as is known
    clock.now = 1.0
    assert names.address_of("host") is None
    answered(names)
    assert names.address_of("host") == "192.0.2.7"
    while clock.now < 40:  # nobody answers any more, and calls continue
        clock.now += 0.5
        names.failed("host")
        if names.address_of("host") is None:
            answered(names)
    assert asked == [0, 1, 3, 7, 15, 25, 35]
    names.worked("host")
    names.failed("host")
    clock.now = 45
    assert names.address_of("host") is None
    answered(names)
    names.failed("host")
    clock.now = 46  # it has worked, so that the pauses begin anew
    assert names.address_of("host") is None
    answered(names)
    names.close()


def test_an_unknown_name_is_an_error_until_it_is_known(clock: Clock) -> None:
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
    clock.now = 1.0
    assert names.address_of("host") is None
    answered(names)
    assert names.address_of("host") == "192.0.2.3"
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
    assert choose_network(["127.0.0.1"], {}, local_addr="localhost").address == "127.0.0.1"
