"""What the kernel says of interfaces and routes, held against what iproute2 shows."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.cluster import netlink
from rallypoint.cluster.interface_facts import InterfaceKind

NOBODYS = "192.0.2.255"


def ip(*words: str) -> Any:
    if shutil.which("ip") is None:
        pytest.skip("ip is not installed (package iproute2)")
    done = subprocess.run(["ip", "-j", *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout or "[]")


def settled(look: Callable[[], Any]) -> tuple[Any, Any]:
    """What iproute2 shows and what `look` finds while nobody changes this machine's network."""
    while True:
        before, found = ip("addr"), look()
        shown = ip("addr")
        if _without_lifetimes(before) == _without_lifetimes(shown):
            return shown, found


def _without_lifetimes(shown: Any) -> Any:
    for each in shown:
        for address in each["addr_info"]:
            for name in ("valid_life_time", "preferred_life_time"):
                address.pop(name, None)
    return shown


def test_interfaces_are_those_that_iproute2_shows() -> None:
    shown, interfaces = settled(netlink.read_interfaces)
    found = {each.name: each for each in interfaces}
    assert list(found) == [each["ifname"] for each in shown]
    for each in shown:
        mine = found[each["ifname"]]
        assert (mine.index, mine.mtu) == (each["ifindex"], each["mtu"])
        usable = [
            address
            for address in each["addr_info"]
            if not address.get("tentative") and not address.get("dadfailed")
        ]
        assert [(a.text, a.prefix) for a in mine.addresses] == [
            (address["local"], address["prefixlen"]) for address in usable
        ]
        if "UP" not in each["flags"]:
            assert not mine.is_up
    assert found["lo"].kind is InterfaceKind.LOOPBACK


def test_routes_are_those_that_iproute2_shows() -> None:
    for address in ("127.0.0.1", "198.51.100.1", "::1"):
        try:
            (shown,) = ip("route", "get", address)
        except subprocess.CalledProcessError:
            with pytest.raises(OSError, match="nreachable"):
                netlink.route_to(address)
            continue
        found = netlink.route_to(address)
        assert found.interface == shown["dev"]
        assert found.is_own == (shown.get("type") == "local")
        if not found.is_own:
            assert found.source == shown["prefsrc"]


def test_where_netlink_is_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> socket.socket:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netlink, "_open", refuse)
    assert netlink.read_interfaces() == ()
    found = netlink.route_to("127.0.0.1")
    assert (found.source, found.is_own) == ("127.0.0.1", True)


def test_addresses_are_known_without_netlink() -> None:
    told = {
        address.text
        for each in netlink.read_interfaces()
        for address in each.addresses
        if each.is_up and len(address.packed) == 4
    }
    assert told <= set(netlink.addresses_without_netlink())


def test_an_answer_that_is_cut_short_is_read_as_far_as_it_goes() -> None:
    whole = struct.pack("=IHHII", 20, 16, 0, 1, 0) + b"abcd"
    for length in range(len(whole) + 4):
        for _, _, body in netlink.messages((whole + whole)[:length] + bytes(8)):
            assert len(body) <= 4
            assert list(netlink.attributes(body)) in ([], [(0x2423 & 0x3FFF, b"")]) or body
    assert list(netlink.messages(bytes(64))) == []
    assert list(netlink.attributes(bytes(64))) == []


def link(driver: str, hardware: int = 1) -> netlink._Link:
    info = struct.pack("=HH", 4 + len(driver), 1) + driver.encode()
    told = {18: info} if driver else {}
    return netlink._Link(1, hardware, 1, told)


@pytest.mark.parametrize(
    ("driver", "hardware", "on_it", "kind"),
    [
        ("", 1, set(), InterfaceKind.PHYSICAL),
        ("", 772, set(), InterfaceKind.LOOPBACK),
        ("", 32, set(), InterfaceKind.INFINIBAND),
        ("", 0xFFFE, set(), InterfaceKind.TUNNEL),
        ("ipoib", 32, set(), InterfaceKind.INFINIBAND),
        ("bridge", 1, set(), InterfaceKind.CONTAINER_BRIDGE),
        ("bridge", 1, {"veth", "tun"}, InterfaceKind.CONTAINER_BRIDGE),
        ("bridge", 1, {"veth", ""}, InterfaceKind.BRIDGE),  # the machine's own card is on it
        ("bridge", 1, {"vxlan"}, InterfaceKind.BRIDGE),
        ("veth", 1, set(), InterfaceKind.VETH),
        ("bond", 1, set(), InterfaceKind.STACKED),
        ("vlan", 1, set(), InterfaceKind.STACKED),
        ("wireguard", 0xFFFE, set(), InterfaceKind.TUNNEL),
        ("tun", 1, set(), InterfaceKind.TUNNEL),
        ("dummy", 1, set(), InterfaceKind.OTHER),
    ],
)
def test_kinds(driver: str, hardware: int, on_it: set[str], kind: InterfaceKind) -> None:
    assert netlink._kind(link(driver, hardware), on_it) is kind


def test_a_speed_is_not_taken_from_another_network_namespaces_interface() -> None:
    for _, name in socket.if_nameindex():
        stranger = link("")
        stranger.name, stranger.index, stranger.mac = name, 1 << 20, bytes(6)
        assert netlink._speed_mbps(stranger) is None
