"""Check 4: the address that each node gives to the others, and its interface. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from rallypoint.base.address import is_loopback
from rallypoint.doctor.check_result import Finding, Pair, Severity, by_value
from rallypoint.doctor.cluster_facts import ClusterFacts, InterfaceFact, NodeFacts


def chosen_addresses(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Missing addresses, and addresses that others cannot reach although they reach another one."""
    for node in cluster.nodes:
        if node.choice.error:
            what, _, advice = node.choice.error.rpartition("; ")
            yield Finding(
                level=Severity.RED,
                check=4,
                where=(node.name,),
                what=what or advice,
                advice=advice if what else _choose_another(node, ""),
                explains=_pairs_of(cluster, node),
            )
        elif cluster.is_shared and is_loopback(node.choice.address) and node.choice.by:
            yield Finding(
                level=Severity.RED,
                check=4,
                where=(node.name,),
                what=f"it gives out the loopback address {node.choice.address}, as"
                f" {node.choice.by} says, which other nodes cannot reach",
                advice=_choose_another(node, ""),
                explains=_pairs_of(cluster, node),
            )
        else:
            yield from _unreached(cluster, node, explained)


def another_interface(node: NodeFacts, routed: str, hosts: Sequence[str]) -> Finding | None:
    """A variable that selects a different interface from the one that leads to the others.

    Args:
        routed: the interface that the routes select.
        hosts: where the others are, or where all meet.
    """
    choice = node.choice
    if not choice.by or not choice.interface or routed in ("", choice.interface):
        return None
    return Finding(
        level=Severity.RED,
        check=4,
        where=(node.name,),
        what=f"it gives out the address {choice.address} ({choice.interface}), as {choice.by} says,"
        f" while {routed} is the interface for {', '.join(hosts)}",
        advice=f"set {choice.by.partition('=')[0]}={routed} there, or unset it",
    )


def differences(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Interfaces that differ from node to node."""
    used = [(node, _used(node)) for node in cluster.nodes]
    known = [(node, interface) for node, interface in used if interface is not None]
    for unit, values in (
        ("MTU {}", [interface.mtu for _, interface in known]),
        ("{} Mbit/s", [interface.speed_mbps for _, interface in known]),
    ):
        told = [
            (node.name, unit.format(value))
            for (node, _), value in zip(known, values, strict=True)
            if value
        ]
        if len({value for _, value in told}) > 1:
            yield Finding(
                level=Severity.YELLOW,
                check=4,
                what=f"the interfaces of the nodes differ: {by_value(told)}",
                advice="set the same on all nodes, or choose another network with"
                " RALLYPOINT_SOCKET_IFNAME",
            )


def _unreached(cluster: ClusterFacts, node: NodeFacts, explained: Set[Pair]) -> Iterator[Finding]:
    probes = [
        probe
        for probe in cluster.probes
        if probe.target == node.number
        and probe.other_address
        and (probe.source, probe.target) not in explained
    ]
    if not probes:
        return
    other = probes[0].other_address
    sources = tuple(cluster.name(probe.source) for probe in probes)
    is_all = len(sources) == len(cluster.nodes) - 1
    who = "no other node reaches" if is_all else f"{sources[0]} does not reach"
    by = f", as {node.choice.by} says" if node.choice.by else ""
    name = f" ({node.choice.interface})" if node.choice.interface else ""
    yield Finding(
        level=Severity.RED,
        check=4,
        where=(node.name,),
        what=f"it gives out the address {node.choice.address}{name}{by}, which {who},"
        f" while {other}{_in_brackets(_interface_of(node, other))} is reached",
        advice=_choose_another(node, other),
        explains=frozenset((probe.source, probe.target) for probe in probes),
    )


def _choose_another(node: NodeFacts, address: str) -> str:
    name = _interface_of(node, address) or next((each.name for each in node.interfaces), "")
    variable = node.choice.by.partition("=")[0] or "RALLYPOINT_SOCKET_IFNAME"
    if variable.startswith("--"):
        return f"give {variable.partition(' ')[0]} an address that the other nodes reach"
    better = f"set {variable}={name}" if name else f"change {variable}"
    return f"{better} there, or unset it" if node.choice.by else f"{better} there"


def _pairs_of(cluster: ClusterFacts, node: NodeFacts) -> frozenset[Pair]:
    numbers = [each.number for each in cluster.nodes]
    mine = node.number
    return frozenset(pair for each in numbers for pair in ((each, mine), (mine, each)))


def _used(node: NodeFacts) -> InterfaceFact | None:
    name = node.choice.interface
    return next((each for each in node.interfaces if each.name == name), None)


def _interface_of(node: NodeFacts, address: str) -> str:
    return next((each.name for each in node.interfaces if address in each.addresses), "")


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
