"""Check 2: which nodes arrived, whether the endpoint's port is free, and who reaches it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import replace

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.doctor.check_result import Finding, Pair, Severity
from rallypoint.doctor.cluster_facts import (
    MEETING,
    ClusterFacts,
    ConnectOutcome,
    EndpointProbe,
    Port,
)

_FIRST_UNPRIVILEGED = 1024
_WHAT = {
    ConnectOutcome.REFUSED: "refuses connections",
    ConnectOutcome.DROPPED: "does not answer",
    ConnectOutcome.UNREACHABLE: "cannot be reached",
    ConnectOutcome.STRANGER: "is used by another program",
}


def absent_nodes(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Nodes about which nothing is known."""
    for absence in cluster.absences:
        yield Finding(
            level=Severity.RED,
            check=absence.check,
            where=(absence.name,) if absence.name else (),
            what=absence.why,
            advice=absence.advice,
        )


def taken_ports(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Ports at which a node cannot listen, mostly because other programs hold them."""
    for node in cluster.nodes:
        for port in node.ports:
            found = _port(port)
            if found is not None:
                yield Finding(
                    level=Severity.RED,
                    check=2,
                    where=(node.name,),
                    what=found[0],
                    advice=found[1],
                    explains=frozenset((each.number, node.number) for each in cluster.nodes),
                )
        if node.probe_error:
            yield Finding(
                level=Severity.RED,
                check=2,
                where=(node.name,),
                what=node.probe_error,
                advice="end the processes that hold them, or give a wider --port-range",
                explains=frozenset((each.number, node.number) for each in cluster.nodes),
            )


def _port(port: Port) -> tuple[str, str] | None:
    """What keeps a node from listening there, and the advice; None if nothing does."""
    number = int(port.endpoint.rpartition(":")[2])
    what = f"port {number}, where the nodes are to meet ({port.endpoint}),"
    another = "with --rdzv-endpoint (or --master-port)"
    if port.held_by:
        return (
            f"{what} is held by {port.held_by}",
            f"end that process, or choose another port {another}",
        )
    if port.error:
        which = "a port from 1024 on" if number < _FIRST_UNPRIVILEGED else "another port"
        return f"{what} cannot be opened ({port.error})", f"choose {which} {another}"
    return None


def endpoints(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Endpoints that some nodes cannot reach although they reach the node."""
    if cluster.is_shared:
        for host, _ in cluster.endpoints:
            if is_loopback(host):
                yield Finding(
                    level=Severity.RED,
                    check=2,
                    what=(
                        f"the endpoint's host is {host}, which means a different machine on each "
                        "node"
                    ),
                    advice="give the first node's name or address, with --rdzv-endpoint or"
                    " --master-addr",
                )
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
        yield Finding(
            level=Severity.RED,
            check=2,
            where=tuple(cluster.name(probe.source) for probe in probes),
            what=f"{endpoint_of(each.host, each.port)}, {each.role}, {_WHAT[each.outcome]}"
            + (f" ({each.detail})" if each.detail else ""),
            advice=_advice(cluster, each),
        )


def _is_misled(cluster: ClusterFacts, probe: EndpointProbe) -> bool:
    """Whether the endpoint's name leads to the probing node itself, which is a finding of its
    own.
    """
    lookups = [
        lookup
        for node in cluster.nodes
        if node.number == probe.source
        for lookup in (*node.names, node.own_name)
        if lookup.host == probe.host
    ]
    return any(lookup.addresses and is_loopback(lookup.addresses[0]) for lookup in lookups)


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
        what = (
            "the job has been started" if probe.role == MEETING else "that process is still running"
        )
        return f"check that {what} on {host}; if so, {firewall}"
    return firewall
