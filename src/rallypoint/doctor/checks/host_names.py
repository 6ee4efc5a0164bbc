"""Check 1: the addresses of the nodes' names on each node, including its own name. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Set

from rallypoint.base.address import is_loopback
from rallypoint.doctor.check_result import Finding, Pair, Severity, by_value
from rallypoint.doctor.cluster_facts import ClusterFacts, Lookup, NodeFacts


def names(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Names that cannot be resolved, and names that lead to the wrong host."""
    if not cluster.is_shared:
        return
    for node in cluster.nodes:
        if node.own_name.error:
            yield Finding(
                level=Severity.YELLOW,
                check=1,
                where=(node.name,),
                what=(
                    f"its own name {node.own_name.host} cannot be resolved there "
                    f"({node.own_name.error})"
                ),
                advice="add it to /etc/hosts: Rallypoint does not need it, but gloo and others do",
            )
        elif _is_loopback(node.own_name):
            yield _loopback(cluster, node, node.own_name)
        absent = [absence.name for absence in cluster.absences]
        for lookup in (each for each in node.names if each.host not in absent):
            yield from _name_of_another(cluster, node, lookup)
    yield from _endpoints_that_differ(cluster)


def _endpoints_that_differ(cluster: ClusterFacts) -> Iterator[Finding]:
    """Endpoints, such as an etcd server, whose addresses on different nodes have nothing in common,
    and are not all one examined node's.
    """
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
            yield Finding(
                level=Severity.YELLOW,
                check=1,
                what=f"the endpoint's name {host} resolves to {told}",
                advice="unless these are the same machine, correct /etc/hosts or the name service",
            )


def _name_of_another(cluster: ClusterFacts, node: NodeFacts, lookup: Lookup) -> Iterator[Finding]:
    number = cluster.hosts.get(lookup.host)
    explains = frozenset() if number is None else frozenset({(node.number, number)})
    if lookup.error:
        yield Finding(
            level=Severity.RED,
            check=1,
            where=(node.name,),
            what=f"the name {lookup.host} cannot be resolved ({lookup.error})",
            advice=f"add {_address_of(cluster, lookup.host)} to /etc/hosts or to the name service,"
            " or give addresses instead of names",
            explains=explains,
        )
    elif _is_loopback(lookup) and not is_loopback(lookup.host):
        yield _loopback(cluster, node, lookup, explains)
    elif number is not None and number != node.number:
        target = next((each for each in cluster.nodes if each.number == number), None)
        if target is not None and not set(lookup.addresses) & set(target.addresses):
            yield Finding(
                level=Severity.YELLOW,
                check=1,
                where=(node.name,),
                what=(
                    f"the name {lookup.host} resolves to {', '.join(lookup.addresses)}, but that "
                    f"node has {', '.join(target.addresses)}"
                ),
                advice="unless an address translation lies between, correct /etc/hosts or the name"
                " service",
            )


def _loopback(
    cluster: ClusterFacts, node: NodeFacts, lookup: Lookup, explains: frozenset[Pair] = frozenset()
) -> Finding:
    """A name that leads to loopback; worded alike for all nodes, as they often share one
    /etc/hosts.
    """
    return Finding(
        level=Severity.RED,
        check=1,
        where=(node.name,),
        what=(
            f"the name {lookup.host} resolves to {lookup.addresses[0]}, a loopback address, "
            "which other nodes cannot reach"
        ),
        advice=f"put {_address_of(cluster, lookup.host)} in /etc/hosts instead of"
        f" {lookup.addresses[0]} {lookup.host}",
        explains=explains,
    )


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
