"""Which address a rank is reached at on this machine; test_interface_choice.py has the rules."""

from __future__ import annotations

import socket

import pytest

from rallypoint.base.errors import HostError
from rallypoint.cluster import network
from rallypoint.cluster.interface_facts import Interface, InterfaceKind
from rallypoint.cluster.netlink import read_interfaces
from rallypoint.cluster.network import (
    choose_network,
)


def test_the_first_variable_that_is_set_counts() -> None:
    variables = {"GLOO_SOCKET_IFNAME": "nope", "RALLYPOINT_SOCKET_IFNAME": "lo"}
    assert choose_network(["127.0.0.1"], variables).address == "127.0.0.1"
    del variables["RALLYPOINT_SOCKET_IFNAME"]
    with pytest.raises(HostError, match="GLOO_SOCKET_IFNAME=nope: no interface"):
        choose_network([], variables)


def test_a_named_address_counts_before_a_variable() -> None:
    variables = {"RALLYPOINT_SOCKET_IFNAME": "nope"}
    found = choose_network(["127.0.0.1"], variables, local_addr="localhost", by="HERE")
    assert (found.address, found.why) == ("127.0.0.1", "HERE localhost says so")


def test_a_store_on_loopback_means_loopback() -> None:
    assert choose_network(["localhost"], {}).address == "127.0.0.1"
    assert choose_network(["::1"], {}).address == "::1"


def test_without_a_hint_some_address_of_this_machine() -> None:
    address = choose_network([], {}).address
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))


def test_own_addresses_begin_with_what_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried, and let in, in that order, and the last ones may be cut off."""
    loopback = next(each for each in read_interfaces() if each.kind is InterfaceKind.LOOPBACK)
    (one, *_) = loopback.addresses
    many = tuple(one.__replace__(text=f"172.17.{number}.1") for number in range(20))
    bridges = [
        Interface(name=f"br-{each.text}", kind=InterfaceKind.CONTAINER_BRIDGE, addresses=(each,))
        for each in many
    ]
    card = Interface(
        name="eth9",
        addresses=tuple(one.__replace__(text=text) for text in ("10.0.0.1", "10.0.0.2")),
    )
    monkeypatch.setattr(network, "read_interfaces", lambda: (loopback, *bridges, card))
    found = network.own_addresses()
    assert found[0] == "10.0.0.1"
    assert len(found) == 16
    assert "127.0.0.1" not in found
    monkeypatch.setattr(network, "read_interfaces", lambda: (loopback, bridges[0], card))
    assert network.own_addresses() == ("10.0.0.1", "172.17.0.1", "10.0.0.2")


def test_own_addresses_where_netlink_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "read_interfaces", lambda: ())
    told = ("127.0.0.1", "10.0.0.1", "10.0.0.2")
    monkeypatch.setattr(network, "addresses_without_netlink", lambda: told)
    assert network.own_addresses() == ("10.0.0.1", "10.0.0.2")
