"""2: who came, whether the endpoint's port is free, and who reaches it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.cluster.health.facts import ClusterFacts, EndpointProbe, Reach
from rallypoint.cluster.health.finding import Finding, Level, Pair

_WHAT = {
    Reach.REFUSED: "refuses connections",
    Reach.DROPPED: "does not answer",
    Reach.UNREACHABLE: "cannot be reached",
    Reach.STRANGER: "is another program's",
}


def absent_nodes(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Nodes of which nothing is known."""
    for absence in cluster.absences:
        yield Finding(
            level=Level.RED,
            check=absence.check,
            where=(absence.name,) if absence.name else (),
            what=absence.why,
            advice=absence.advice,
        )


def taken_ports(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Ports that others hold."""
    for node in cluster.nodes:
        for port in node.ports:
            if port.held_by:
                number = port.endpoint.rpartition(":")[2]
                yield Finding(
                    level=Level.RED,
                    check=2,
                    where=(node.name,),
                    what=f"port {number}, where the nodes are to meet ({port.endpoint}), is held by"
                    f" {port.held_by}",
                    advice="end that process, or choose another port with --rdzv-endpoint (or"
                    " --master-port)",
                    explains=frozenset((each.number, node.number) for each in cluster.nodes),
                )
        if node.probe_error:
            yield Finding(
                level=Level.RED,
                check=2,
                where=(node.name,),
                what=node.probe_error,
                advice="end what holds them, or give a wider --port-range",
                explains=frozenset((each.number, node.number) for each in cluster.nodes),
            )


def endpoints(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Endpoints that some nodes cannot reach, though they reach the node."""
    if cluster.is_shared:
        for host, _ in cluster.endpoints:
            if is_loopback(host):
                yield Finding(
                    level=Level.RED,
                    check=2,
                    what=f"the endpoint's host is {host}, which is another machine on each node",
                    advice="give the first node's name or address, with --rdzv-endpoint or"
                    " --master-addr",
                )
    held = {port.endpoint for node in cluster.nodes for port in node.ports if port.held_by}
    grouped: dict[tuple[str, int, Reach, str], list[EndpointProbe]] = {}
    for probe in cluster.endpoint_probes:
        is_told = (
            probe.reach in (Reach.REACHED, Reach.UNKNOWN)
            or cluster.hosts.get(probe.host) == probe.source
            or (probe.source, cluster.hosts.get(probe.host, -1)) in explained
            or _is_misled(cluster, probe)
        )
        endpoint = endpoint_of(probe.host, probe.port)
        if is_told or endpoint in held or is_loopback(probe.host):
            continue
        key = (probe.host, probe.port, probe.reach, probe.detail)
        grouped.setdefault(key, []).append(probe)
    for (host, port, reach, detail), probes in grouped.items():
        yield Finding(
            level=Level.RED,
            check=2,
            where=tuple(cluster.name(probe.source) for probe in probes),
            what=f"{endpoint_of(host, port)}, where the nodes are to meet, {_WHAT[reach]}"
            + (f" ({detail})" if detail else ""),
            advice=_advice(cluster.hosts, host, port, reach, is_listening=host in cluster.hosts),
        )


def _is_misled(cluster: ClusterFacts, probe: EndpointProbe) -> bool:
    """Whether the endpoint's name leads to the node itself, which is told as such."""
    lookups = [
        lookup
        for node in cluster.nodes
        if node.number == probe.source
        for lookup in (*node.names, node.own_name)
        if lookup.host == probe.host
    ]
    return any(lookup.addresses and is_loopback(lookup.addresses[0]) for lookup in lookups)


def _advice(
    hosts: Mapping[str, int], host: str, port: int, reach: Reach, *, is_listening: bool
) -> str:
    if reach is Reach.STRANGER:
        return "choose another port with --rdzv-endpoint (or --master-port), or end that program"
    if reach is Reach.UNREACHABLE:
        return f"look at the route to {host} (ip route get), or name an address that is reachable"
    firewall = f"allow TCP to port {port} in the firewall of {host}, and in those between"
    if reach is Reach.REFUSED and not is_listening:
        return f"see that the job has been started on {host}; if it has, {firewall}"
    return firewall
