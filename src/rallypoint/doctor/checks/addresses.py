"""Checks 1, 2 and 4: names, endpoints, and the address that each node gives to others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.doctor.check_result import Finding, Pair, Severity, by_value
from rallypoint.doctor.cluster_facts import (
    MEETING,
    ClusterFacts,
    ConnectOutcome,
    EndpointProbe,
    Lookup,
    NodeFacts,
    Port,
)

_FIRST_UNPRIVILEGED = 1024
_WHAT = {
    ConnectOutcome.REFUSED: "refuses connections",
    ConnectOutcome.DROPPED: "does not answer",
    ConnectOutcome.UNREACHABLE: "cannot be reached",
    ConnectOutcome.STRANGER: "is used by another program",
}

# Names.


def names(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 1: names that cannot be resolved, and names that lead to the wrong host."""
    are_here = bool(cluster.hosts) and all(map(is_loopback, cluster.hosts))  # all are one machine
    if not cluster.is_shared or are_here:
        return
    absent = [absence.name for absence in cluster.absences]
    for node in cluster.nodes:
        own = node.own_name
        if own.error:
            what = f"its own name {own.host} cannot be resolved there ({own.error})"
            advice = "add it to /etc/hosts: Rallypoint does not need it, but gloo and others do"
            yield Finding(Severity.YELLOW, 1, (node.name,), what, advice)
        elif _is_loopback(own):
            is_used = own.host in cluster.hosts or own.host in dict(cluster.endpoints)
            yield _loopback(cluster, node, own) if is_used else _own_loopback(cluster, node)
        for lookup in (each for each in node.names if each.host not in absent):
            yield from _name_of_another(cluster, node, lookup)
    yield from _endpoints_that_differ(cluster)


def _endpoints_that_differ(cluster: ClusterFacts) -> Iterator[Finding]:
    """Endpoints that are different machines to different nodes, and not one examined node."""
    for host in dict.fromkeys(host for host, _ in cluster.endpoints):
        found = [
            (node.name, lookup.addresses)
            for node in cluster.nodes
            for lookup in node.names
            if lookup.host == host and lookup.addresses and not _is_loopback(lookup)
        ]
        if host in cluster.hosts or not found:
            continue
        is_of_one = any(
            all(set(addresses) & set(node.addresses) for _, addresses in found)
            for node in cluster.nodes
        )
        if not is_of_one and not set.intersection(*(set(each) for _, each in found)):
            told = by_value([(name, ", ".join(addresses)) for name, addresses in found])
            what = f"the endpoint's name {host} resolves to {told}"
            advice = "unless these are the same machine, correct /etc/hosts or the name service"
            yield Finding(Severity.YELLOW, 1, (), what, advice)


def _name_of_another(cluster: ClusterFacts, node: NodeFacts, lookup: Lookup) -> Iterator[Finding]:
    number = cluster.hosts.get(lookup.host)
    explains = frozenset() if number is None else frozenset({(node.number, number)})
    if lookup.error:
        what = f"the name {lookup.host} cannot be resolved ({lookup.error})"
        advice = (
            f"add {_address_of(cluster, lookup.host)} to /etc/hosts or to the name service, or give"
            " addresses instead of names"
        )
        yield Finding(Severity.RED, 1, (node.name,), what, advice, explains)
    elif _is_loopback(lookup) and not is_loopback(lookup.host):
        yield _loopback(cluster, node, lookup, explains)
    elif number is not None and number != node.number:
        target = next((each for each in cluster.nodes if each.number == number), None)
        if target is not None and not set(lookup.addresses) & set(target.addresses):
            what = (
                f"the name {lookup.host} resolves to {', '.join(lookup.addresses)}, but that node"
                f" has {', '.join(target.addresses)}"
            )
            advice = (
                "unless an address translation lies between, correct /etc/hosts or the name service"
            )
            yield Finding(Severity.YELLOW, 1, (node.name,), what, advice)


def _loopback(
    cluster: ClusterFacts, node: NodeFacts, lookup: Lookup, explains: frozenset[Pair] = frozenset()
) -> Finding:
    """A name that leads to loopback; worded alike for all nodes, as they often share a file."""
    host, address = lookup.host, lookup.addresses[0]
    what = (
        f"the name {host} resolves to {address}, a loopback address, which other nodes cannot reach"
    )
    advice = f"put {_address_of(cluster, host)} in /etc/hosts instead of {address} {host}"
    return Finding(Severity.RED, 1, (node.name,), what, advice, explains)


def _own_loopback(cluster: ClusterFacts, node: NodeFacts) -> Finding:
    """A node's own name that leads to loopback, and by which no other node looks for it."""
    host, address = node.own_name.host, node.own_name.addresses[0]
    what = f"its own name {host} resolves to {address}, a loopback address"
    advice = (
        f"PyTorch's gloo may give that address to other nodes: set GLOO_SOCKET_IFNAME, or put"
        f" {_address_of(cluster, host)} in /etc/hosts instead of {address} {host}"
    )
    return Finding(Severity.YELLOW, 1, (node.name,), what, advice)


def _is_loopback(lookup: Lookup) -> bool:
    return bool(lookup.addresses) and is_loopback(lookup.addresses[0])


def _address_of(cluster: ClusterFacts, host: str) -> str:
    """The line for /etc/hosts, as far as it is known."""
    for node in cluster.nodes:
        is_it = cluster.hosts.get(host) == node.number or node.own_name.host == host
        address = node.choice.address or next(iter(node.addresses), "")
        if is_it and address and not is_loopback(address):
            return f"'{address} {host}'"
    return f"its address and the name {host}"


# Endpoints.


def absent_nodes(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 2, or another: nodes about which nothing is known."""
    for each in cluster.absences:
        where = (each.name,) if each.name else ()
        yield Finding(Severity.RED, each.check, where, each.why, each.advice)


def taken_ports(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 2: ports at which a node cannot listen, mostly because other programs hold them."""
    for node in cluster.nodes:
        found = [each for port in node.ports if (each := _port(port)) is not None]
        if node.probe_error:
            advice = "end the processes that hold them, or give a wider --port-range"
            found.append((node.probe_error, advice))
        explains = frozenset((each.number, node.number) for each in cluster.nodes)
        for what, advice in found:
            yield Finding(Severity.RED, 2, (node.name,), what, advice, explains)


def _port(port: Port) -> tuple[str, str] | None:
    """What keeps a node from listening there, and the advice; None if nothing does."""
    number = int(port.endpoint.rpartition(":")[2])
    what = f"port {number} of the endpoint ({port.endpoint})"
    another = "with --rdzv-endpoint (or --master-port)"
    if port.held_by:
        advice = f"end that process, or choose another port {another}"
        return f"{what} is held by {port.held_by}", advice
    if port.error:
        which = "a port from 1024 on" if number < _FIRST_UNPRIVILEGED else "another port"
        return f"{what} cannot be opened ({port.error})", f"choose {which} {another}"
    return None


def endpoints(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Check 2: endpoints that some nodes cannot reach although they reach the node."""
    for host, _ in cluster.endpoints if cluster.is_shared else ():
        if is_loopback(host):
            what = f"the endpoint's host is {host}, which means a different machine on each node"
            advice = "give the first node's name or address, with --rdzv-endpoint or --master-addr"
            yield Finding(Severity.RED, 2, (), what, advice)
    closed = {port.endpoint for node in cluster.nodes for port in node.ports if _port(port)}
    grouped: dict[EndpointProbe, list[EndpointProbe]] = {}
    for probe in cluster.endpoint_probes:
        is_told = (
            probe.outcome in (ConnectOutcome.REACHED, ConnectOutcome.UNKNOWN)
            or cluster.hosts.get(probe.host) == probe.source
            or (probe.source, cluster.hosts.get(probe.host, -1)) in explained
            or _is_misled(cluster, probe)
        )
        endpoint = endpoint_of(probe.host, probe.port)
        if is_told or endpoint in closed or is_loopback(probe.host):
            continue
        grouped.setdefault(replace(probe, source=0), []).append(probe)
    for each, probes in grouped.items():
        where = tuple(cluster.name(probe.source) for probe in probes)
        what = f"{endpoint_of(each.host, each.port)}, {each.role}, {_WHAT[each.outcome]}"
        what += f" ({each.detail})" if each.detail else ""
        yield Finding(Severity.RED, 2, where, what, _advice(cluster, each))


def _is_misled(cluster: ClusterFacts, probe: EndpointProbe) -> bool:
    """Whether the endpoint's name resolves to the probing node itself, which is reported
    separately.
    """
    return any(
        lookup.host == probe.host and _is_loopback(lookup)
        for node in cluster.nodes
        if node.number == probe.source
        for lookup in (*node.names, node.own_name)
    )


def _advice(cluster: ClusterFacts, probe: EndpointProbe) -> str:
    host, ports = probe.host, f"port {probe.port}"
    if probe.outcome is ConnectOutcome.STRANGER:
        return "choose another port with --rdzv-endpoint (or --master-port), or end that program"
    if probe.outcome is ConnectOutcome.UNREACHABLE:
        return f"check the route to {host} (ip route get), or give a reachable address"
    if probe.role != MEETING:  # any port would do: the next job uses another one
        ports = f"ports {cluster.port_range}" if cluster.port_range else "all ports from 1024 on"
    firewall = f"allow TCP to {ports} in the firewall of {host}, and in any between"
    if probe.outcome is ConnectOutcome.REFUSED and host not in cluster.hosts:
        is_start = probe.role == MEETING
        what = "the job has been started" if is_start else "that process is still running"
        return f"check that {what} on {host}; if so, {firewall}"
    return firewall


# Interfaces.


def chosen_addresses(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Check 4: missing addresses, and addresses that no node reaches, although another one is
    reached.
    """
    for node in cluster.nodes:
        choice, advice = node.choice, _choose_another(node, "")
        if choice.error:
            what, _, own_advice = choice.error.rpartition("; ")
            what, advice = (what, own_advice) if what else (own_advice, advice)
        elif cluster.is_shared and is_loopback(choice.address) and choice.by:
            what = (
                f"it advertises the loopback address {choice.address} ({choice.by}), which other"
                " nodes cannot reach"
            )
        else:
            yield from _unreached(cluster, node, explained)
            continue
        mine, numbers = node.number, [each.number for each in cluster.nodes]
        explains = frozenset(pair for each in numbers for pair in ((each, mine), (mine, each)))
        yield Finding(Severity.RED, 4, (node.name,), what, advice, explains)


def another_interface(node: NodeFacts, routed: str, hosts: Sequence[str]) -> Finding | None:
    """A variable selects another interface than `routed`, the one that leads to `hosts`."""
    choice = node.choice
    if not choice.by or not choice.interface or routed in ("", choice.interface):
        return None
    what = (
        f"it advertises the address {choice.address} ({choice.interface}), as {choice.by} says,"
        f" while {routed} is the interface for {', '.join(hosts)}"
    )
    advice = f"set {choice.by.partition('=')[0]}={routed} there, or unset it"
    return Finding(Severity.RED, 4, (node.name,), what, advice)


def differences(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 4: interfaces that differ from node to node."""
    used = [
        (node.name, each)
        for node in cluster.nodes
        for each in node.interfaces
        if each.name == node.choice.interface
    ]
    for told in (
        [(name, f"MTU {each.mtu}") for name, each in used if each.mtu],
        [(name, f"{each.speed_mbps} Mbit/s") for name, each in used if each.speed_mbps],
    ):
        if len({value for _, value in told}) > 1:
            what = f"the interfaces of the nodes differ: {by_value(told)}"
            advice = (
                "set the same on all nodes, or choose another network with RALLYPOINT_SOCKET_IFNAME"
            )
            yield Finding(Severity.YELLOW, 4, (), what, advice)


def _unreached(cluster: ClusterFacts, node: NodeFacts, explained: Set[Pair]) -> Iterator[Finding]:
    probes = [
        probe
        for probe in cluster.probes
        if probe.target == node.number and probe.other_address and probe.pair not in explained
    ]
    if not probes:
        return
    choice, other = node.choice, probes[0].other_address
    is_all = len(probes) == len(cluster.nodes) - 1
    who = "no other node reaches" if is_all else f"{cluster.name(probes[0].source)} does not reach"
    by = f", as {choice.by} says" if choice.by else ""
    what = (
        f"it advertises the address {choice.address}{_in_brackets(choice.interface)}{by}, which"
        f" {who}, while {other}{_in_brackets(node.interface_of(other))} is reached"
    )
    explains = frozenset(probe.pair for probe in probes)
    advice = _choose_another(node, other)
    yield Finding(Severity.RED, 4, (node.name,), what, advice, explains)


def _choose_another(node: NodeFacts, address: str) -> str:
    name = node.interface_of(address) or next((each.name for each in node.interfaces), "")
    variable = node.choice.by.partition("=")[0] or "RALLYPOINT_SOCKET_IFNAME"
    if variable.startswith("--"):
        return f"give {variable.partition(' ')[0]} an address that the other nodes reach"
    better = f"set {variable}={name}" if name else f"change {variable}"
    return f"{better} there, or unset it" if node.choice.by else f"{better} there"


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
