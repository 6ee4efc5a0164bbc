"""Which interface is chosen, on made-up machines, and what is said about it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import HostError, InvalidArgumentError
from rallypoint.cluster.interface_choice import AddressChoice, NameChoice, choose, matching
from rallypoint.cluster.interface_facts import (
    Address,
    Interface,
    InterfaceKind,
    InterfaceTarget,
    Route,
)

NAMES = ["lo", "eth0", "eth1", "ib0", "docker0"]


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ("eth", ["eth0", "eth1"]),
        ("ib,eth", ["ib0", "eth0", "eth1"]),
        ("eth1,eth", ["eth1", "eth0"]),
        ("=eth", []),
        ("=eth0", ["eth0"]),
        ("=eth1,ib0", ["eth1", "ib0"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("^lo,docker", ["eth0", "eth1", "ib0"]),
        ("^=eth0,lo", ["eth1", "ib0", "docker0"]),
        ("nothing", []),
        (",", []),
    ],
)
def test_matching_as_nccl_does(wish: str, found: list[str]) -> None:
    assert matching(wish, NAMES) == found


def test_a_name_that_is_another_ones_beginning_comes_first() -> None:
    names = ["eth10", "eth11", "eth1"]
    assert matching("eth1", names) == ["eth1", "eth10", "eth11"]
    assert matching("=eth1", names) == ["eth1"]
    assert matching("^eth1", names) == []
    assert matching("^=eth1", names) == ["eth10", "eth11"]


def address(text: str) -> Address:
    """From ``"10.0.0.1/24"``; "fe80::1/64" is good on its link only."""
    plain, _, prefix = text.partition("/")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    packed = socket.inet_pton(family, plain)
    is_link_only = plain.startswith(("fe80", "169.254."))
    return Address(text=plain, packed=packed, prefix=int(prefix), is_link_only=is_link_only)


def interface(name: str, kind: InterfaceKind, *addresses: str, is_up: bool = True) -> Interface:
    return Interface(
        name=name, kind=kind, is_up=is_up, addresses=tuple(address(each) for each in addresses)
    )


LO = interface("lo", InterfaceKind.LOOPBACK, "127.0.0.1/8", "::1/128")
ETH0 = interface("eth0", InterfaceKind.PHYSICAL, "10.0.0.1/24", "fe80::1/64")
ETH1 = interface("eth1", InterfaceKind.PHYSICAL, "10.1.0.1/16")
IB0 = interface("ib0", InterfaceKind.INFINIBAND, "192.168.7.1/24")
DOCKER = interface("docker0", InterfaceKind.CONTAINER_BRIDGE, "172.17.0.1/16")
TUN = interface("tun0", InterfaceKind.TUNNEL, "10.8.0.2/24")
IDLE = interface("eth2", InterfaceKind.PHYSICAL, "10.2.0.1/24", is_up=False)
IPV6 = interface("eth0", InterfaceKind.PHYSICAL, "fe80::1/64", "fd00::1/64")
DUAL = interface("eth0", InterfaceKind.PHYSICAL, "10.0.0.1/24", "10.0.5.1/24", "fd00::1/64")
BMC = interface("usb0", InterfaceKind.PHYSICAL, "169.254.3.1/16")
MACHINE = (LO, DOCKER, IDLE, ETH0, ETH1, IB0)


def target(
    host: str, via: Interface | None, source: str = "", *, is_own: bool = False
) -> InterfaceTarget:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    route = None
    if via is not None:
        lasting = [each for each in via.addresses if not each.is_link_only]
        of_family = [each for each in lasting if (":" in each.text) == (":" in host)]
        chosen = source or (of_family or list(via.addresses))[0].text
        route = Route(interface=via.name, source=chosen, is_own=is_own)
    return InterfaceTarget(
        name=f"at {host}",
        address=host,
        packed=socket.inet_pton(family, host),
        route=route,
        why_not="" if route else "Network is unreachable",
    )


NEAR = target("10.0.0.9", ETH0)
FAR = target("203.0.113.9", ETH1)
OWN = target("10.1.0.1", LO, "10.1.0.1", is_own=True)


@pytest.mark.parametrize(
    ("machine", "towards", "default", "expected"),
    [
        # The route counts, wherever the interface stands.
        (MACHINE, [NEAR], "", "eth0, 10.0.0.1 (MTU 1500): the route to at 10.0.0.9 uses it"),
        (MACHINE, [FAR], "eth0", "eth1, 10.1.0.1 (MTU 1500): the route to at 203.0.113.9 uses"),
        (MACHINE, [target("10.9.9.9", None), NEAR], "", "eth0, 10.0.0.1 (MTU 1500): the route"),
        (MACHINE, [target("172.17.0.5", DOCKER)], "", "docker0, 172.17.0.1 (MTU 1500): the rou"),
        (MACHINE, [OWN], "eth0", "eth1, 10.1.0.1 (MTU 1500): at 10.1.0.1 is on this machine"),
        ((LO, TUN, ETH0), [target("10.8.0.1", TUN)], "eth0", "tun0, 10.8.0.2 (MTU 1500): the r"),
        ((LO, IPV6), [target("fd00::9", IPV6)], "", "eth0, fd00::1 (MTU 1500): the route to"),
        ((LO, DUAL), [target("fd00::9", DUAL)], "", "eth0, fd00::1 (MTU 1500): the route to"),
        # The kernel's source counts, also if another interface has it, as with routes to hosts.
        (MACHINE, [target("10.0.0.9", ETH0, "10.1.0.1")], "", "eth0, 10.1.0.1 (MTU 1500): the r"),
        # An interface that netlink does not tell, by its address; and none at all.
        (
            MACHINE,
            [target("10.0.0.9", interface("", InterfaceKind.OTHER, "10.1.0.1/8"))],
            "",
            "eth1, 10.",
        ),
        ((), [NEAR], "", "10.0.0.1: the route to at 10.0.0.9 uses it"),
        ((LO, ETH0), [target("127.0.0.1", LO, is_own=True)], "", "lo, 127.0.0.1 (MTU 1500): at"),
        # Nothing says where the others are.
        (MACHINE, [], "eth1", "eth1, 10.1.0.1 (MTU 1500): the default route uses it, a"),
        (
            MACHINE,
            [],
            "",
            "eth0, 10.0.0.1 (MTU 1500): it is the likeliest, because the other nodes'",
        ),
        ((LO, DOCKER, IDLE, ETH0), [], "docker0", "eth0, 10.0.0.1 (MTU 1500): it is the only o"),
        ((LO, TUN, ETH0), [], "tun0", "eth0, 10.0.0.1 (MTU 1500): it is the likeliest"),
        ((LO, BMC, ETH0), [], "", "eth0, 10.0.0.1 (MTU 1500): it is the only one that others ca"),
        ((LO, IPV6), [], "", "eth0, fd00::1 (MTU 1500): it is the only one that others can reac"),
        ((LO, DOCKER, IDLE), [], "", "lo, 127.0.0.1 (MTU 1500): no other interface can be used"),
        ((), [], "", "127.0.0.1: no other interface can be used"),
    ],
)
def test_without_a_wish(
    machine: Sequence[Interface], towards: Sequence[InterfaceTarget], default: str, expected: str
) -> None:
    found = choose(machine, towards=towards, default=default)
    assert str(found).startswith(expected)
    assert not found.is_wished


@pytest.mark.parametrize(
    ("wish", "towards", "expected"),
    [
        ("eth", [NEAR], "eth0, 10.0.0.1 (MTU 1500): X=eth says so"),
        ("eth", [FAR], "eth1, 10.1.0.1 (MTU 1500): X=eth says so"),  # of equals, what leads there
        ("ib,eth", [NEAR], "ib0, 192.168.7.1 (MTU 1500): X=ib,eth says so, though the route to at"
                           " 10.0.0.9 uses eth0 (10.0.0.1)"),
        ("=eth1", [NEAR], "eth1, 10.1.0.1 (MTU 1500): X==eth1 says so, though the route to at 10.0"
                          ".0.9 uses eth0 (10.0.0.1)"),
        ("^lo,docker", [FAR], "eth1, 10.1.0.1 (MTU 1500): X=^lo,docker says so"),
        ("^lo,docker", [], "eth0, 10.0.0.1 (MTU 1500): X=^lo,docker says so"),
        ("^lo,eth", [NEAR], "ib0, 192.168.7.1 (MTU 1500): X=^lo,eth says so, though the route to"),
        ("eth2,eth1", [], "eth1, 10.1.0.1 (MTU 1500): X=eth2,eth1 says so"),  # eth2 is down
        ("docker", [NEAR], "docker0, 172.17.0.1 (MTU 1500): X=docker says so, though the route"),
        ("lo", [], "lo, 127.0.0.1 (MTU 1500): X=lo says so"),
        ("eth1", [OWN], "eth1, 10.1.0.1 (MTU 1500): X=eth1 says so"),
        ("eth0", [OWN], "eth0, 10.0.0.1 (MTU 1500): X=eth0 says so, though at 10.1.0.1 is at eth1"),
        ("lo", [OWN], "lo, 127.0.0.1 (MTU 1500): X=lo says so, though at 10.1.0.1 is at eth1"),
    ],
)  # fmt: skip
def test_interfaces_by_name(wish: str, towards: Sequence[InterfaceTarget], expected: str) -> None:
    found = choose(MACHINE, wish=NameChoice(by="X", text=wish), towards=towards)
    assert str(found).startswith(expected)
    assert str(found).count("though") == expected.count("though")
    assert found.is_wished
    assert found.is_doubtful == (wish == "docker")


def test_two_cards_of_one_network_are_as_good() -> None:
    twin = interface("eth9", InterfaceKind.PHYSICAL, "10.0.0.7/24")
    found = choose((LO, ETH0, twin), wish=NameChoice(by="X", text="eth9"), towards=[NEAR])
    assert str(found) == "eth9, 10.0.0.7 (MTU 1500): X=eth9 says so"
    assert found.told.endswith("; passed over: eth0 (leads there)")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("10.0.5.200", "10.0.5.1"), ("10.0.0.200", "10.0.0.1"), ("fd00::77", "fd00::1")],
)
def test_of_several_addresses_that_of_the_others_network(host: str, expected: str) -> None:
    wish = NameChoice(by="X", text="eth0")
    assert choose((LO, DUAL), wish=wish, towards=[target(host, DUAL)]).address == expected


def test_an_address_that_will_go_is_the_last_choice() -> None:
    passing = address("fd00::1111/64").__replace__(is_passing=True)
    card = Interface(name="eth0", addresses=(passing, address("fd00::1/64")))
    assert choose((LO, card)).address == "fd00::1"


def test_a_variable_that_matches_nothing_says_what_there_is() -> None:
    with pytest.raises(HostError) as raised:
        choose(
            (*MACHINE, TUN), wish=NameChoice(by="GLOO_SOCKET_IFNAME", text="wlan"), towards=[FAR]
        )
    assert str(raised.value) == (
        "GLOO_SOCKET_IFNAME=wlan: no interface of this machine that is up and has an address"
        " matches: it has lo (127.0.0.1, ::1), docker0 (172.17.0.1), eth2 (down, 10.2.0.1),"
        " eth0 (10.0.0.1), eth1 (10.1.0.1), ib0 (192.168.7.1), tun0 (10.8.0.2),"
        " and the route to at 203.0.113.9 uses eth1 (10.1.0.1);"
        " set GLOO_SOCKET_IFNAME=eth1, or unset it"
    )


def test_loopback_is_refused_when_others_are_remote() -> None:
    wish = NameChoice(by="NCCL_SOCKET_IFNAME", text="lo")
    with pytest.raises(HostError, match=r"chooses lo .*; choose eth1 \(10\.1\.0\.1\)"):
        choose(MACHINE, wish=wish, towards=[FAR])
    with pytest.raises(HostError, match="choose another interface"):
        choose(MACHINE, wish=wish, towards=[OWN], has_remote_peers=True)
    with pytest.raises(HostError, match=r"is its loopback 127\.0\.0\.1"):
        choose(MACHINE, towards=[target("10.0.0.9", ETH0, "127.0.0.1")])
    with pytest.raises(
        HostError, match=r"no interface at which .* is up; it has lo \(127.*eth2 \(down"
    ):
        choose((LO, DOCKER, IDLE), has_remote_peers=True)


def test_an_own_name_that_only_this_machine_knows_as_its_loopback() -> None:
    """127.0.1.1, as Debian writes it into /etc/hosts."""
    mine = target("127.0.1.1", LO, "127.0.0.1", is_own=True)
    assert choose(MACHINE, towards=[mine]).address == "127.0.1.1"
    found = choose(MACHINE, towards=[mine], has_remote_peers=True, default="eth1")
    assert found.address == "10.1.0.1"


def test_no_route_names_what_there_is() -> None:
    with pytest.raises(HostError, match=r"no route to at 10\.9\.9\.9 \(Network is unr.*eth0 \(10"):
        choose(MACHINE, towards=[target("10.9.9.9", None)])


def wish_for(*addresses: str, text: str = "", own: Sequence[str] = ()) -> AddressChoice:
    return AddressChoice(
        by="--local-addr", text=text or addresses[0], addresses=addresses, own=tuple(own)
    )


def test_an_address_that_the_user_names() -> None:
    found = choose(MACHINE, wish=wish_for("10.1.0.1", own=["10.1.0.1"]), towards=[NEAR])
    assert str(found) == (
        "eth1, 10.1.0.1 (MTU 1500): --local-addr 10.1.0.1 says so, though the route to at 10.0.0.9"
        " uses eth0 (10.0.0.1)"
    )
    assert found.is_own
    found = choose(MACHINE, wish=wish_for("198.51.100.7"), towards=[NEAR])
    assert (found.address, found.name, found.is_own) == ("198.51.100.7", "", False)
    assert "though no interface of this machine has that address" in found.why
    mixed = wish_for("198.51.100.7", "10.0.0.1", text="me", own=["10.0.0.1"])
    assert choose(MACHINE, wish=mixed, towards=[NEAR]).address == "10.0.0.1"


def test_a_loopback_address_that_the_user_names() -> None:
    own = wish_for("127.0.0.1", own=["127.0.0.1"])
    with pytest.raises(InvalidArgumentError, match=r"--local-addr 127\.0\.0\.1 is this machine's"):
        choose(MACHINE, wish=own, towards=[NEAR])
    assert choose(MACHINE, wish=own, towards=[target("127.0.0.1", LO, is_own=True)]).name == "lo"
    name = wish_for("127.0.1.1", text="me", own=["127.0.1.1"])  # others know it as something else
    assert choose(MACHINE, wish=name, towards=[NEAR]).address == "10.0.0.1"


def test_what_was_passed_over_and_whether_there_was_a_choice() -> None:
    found = choose(MACHINE, towards=[NEAR])
    assert found.told.endswith(
        "; passed over: eth1 (the route uses another one), ib0 (the route uses another one),"
        " docker0 (container bridge)"
    )
    assert found.had_rivals
    alone = choose((LO, DOCKER, IDLE, ETH0, BMC), towards=[NEAR])
    assert not alone.had_rivals
    assert alone.event == {
        "interface": "eth0",
        "address": "10.0.0.1",
        "kind": "network card",
        "speed_mbps": None,
        "mtu": 1500,
        "reason": "the route to at 10.0.0.9 uses it",
        "passed_over": [
            {"interface": "docker0", "why": "container bridge"},
        ],
    }
    bridges = [DOCKER.__replace__(name=f"br-{number}") for number in range(9)]
    told = choose((LO, ETH0, *bridges), towards=[NEAR]).told
    assert told.endswith("br-3 (container bridge), 5 more")


def test_speeds_are_shown_where_they_are_known() -> None:
    assert ETH0.__replace__(speed_mbps=25_000, mtu=9000).rate == "25 Gbit/s, MTU 9000"
    assert ETH0.__replace__(speed_mbps=2500).rate == "2.5 Gbit/s, MTU 1500"
    assert ETH0.__replace__(speed_mbps=100).rate == "100 Mbit/s, MTU 1500"


@given(st.ip_addresses(), st.ip_addresses(), st.integers(0, 128))
def test_networks_as_the_standard_library_has_them(
    one: ipaddress.IPv4Address | ipaddress.IPv6Address,
    other: ipaddress.IPv4Address | ipaddress.IPv6Address,
    prefix: int,
) -> None:
    prefix = min(prefix, one.max_prefixlen)
    near = ipaddress.ip_address(int(one) ^ 1) if one.version == 4 else one + 0
    mine = Address(text=str(one), packed=one.packed, prefix=prefix)
    network = ipaddress.ip_network((int(one), prefix), strict=False)
    if one.version == 6:
        network = ipaddress.ip_network((one.packed, prefix), strict=False)
    assert mine.is_network_of(other.packed) == (other in network)
    assert mine.is_network_of(near.packed) == (near in network)
