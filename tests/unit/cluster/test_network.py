"""Addresses on this machine; between hosts, see tests/system/test_hosts.py."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from tests.conftest import need_ipv6

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.cluster import network
from rallypoint.cluster.network import addresses_of, choose_network, is_here

NOBODY = "no-such-host.invalid"


def test_numeric_addresses_are_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("asked a name service")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert addresses_of("192.0.2.7") == ["192.0.2.7"]
    assert addresses_of("2001:db8::1") == ["2001:db8::1"]
    assert is_here("127.0.0.1")
    assert is_here("127.3.2.1")
    assert not is_here("192.0.2.7")  # reserved for documentation: no machine has it
    assert is_here(os.uname().nodename)  # whether or not anybody can resolve it
    assert choose_network(["localhost"], {}).address == "127.0.0.1"
    assert choose_network(["192.0.2.7"], {}, local_addr="10.1.2.3").address == "10.1.2.3"


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(HostError, match=f"cannot find the host '{NOBODY}'"):
        addresses_of(NOBODY)
    with pytest.raises(HostError, match="give its address instead of its name"):
        choose_network([NOBODY], {})


def test_names_in_the_hosts_file() -> None:
    assert addresses_of("localhost")[0] == "127.0.0.1"
    assert is_here("localhost")


def test_loopback_is_refused_when_others_are_remote() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"--local-addr 127\.0\.0\.1 is this machine's loop"
    ):
        choose_network(["192.0.2.7"], {}, local_addr="127.0.0.1", has_remote_peers=True)


def test_ipv6_loopback() -> None:
    need_ipv6()
    assert is_here("::1")
    assert choose_network(["::1"], {}).address == "::1"


def test_an_address_is_not_ours_because_it_can_be_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sysctl = tmp_path / "ipv4"
    sysctl.write_text("1\n")
    monkeypatch.setattr(network, "_NONLOCAL", f"{tmp_path}/{{}}")
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    assert not is_here("192.0.2.7")
    sysctl.write_text("0\n")
    assert is_here("192.0.2.7")
