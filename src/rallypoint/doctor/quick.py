"""What separates a node from the others, for an error that is about to be raised. Within two
seconds, it checks names, the endpoint's port, and the interface that a variable selects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from rallypoint.base.address import endpoint_of, is_loopback
from rallypoint.base.errors import RallypointError
from rallypoint.cluster.network import IFNAME_VARIABLES, UnknownHostError, is_here
from rallypoint.doctor.check_result import Severity
from rallypoint.doctor.checks import diagnose
from rallypoint.doctor.checks.addresses import another_interface
from rallypoint.doctor.cluster_facts import MEETING, ClusterFacts, ConnectOutcome, Lookup, NodeFacts
from rallypoint.doctor.collect import begin, choose, look_at_network
from rallypoint.doctor.probe import probe_endpoints
from rallypoint.store.port_holder import holder_of, is_launcher

# Whatever hangs, a finding about it comes within the limit: a name is resolved, then called.
LIMIT_S = 1.8
_NAME_S, _CONNECT_S = 0.7, 1.0


def finding_about(
    endpoints: Sequence[tuple[str, int]],
    environ: Mapping[str, str],
    *,
    count: int,
    role: str = MEETING,
    is_caller: bool = True,
    is_early: bool = False,
) -> str:
    """The first cause that is found, with the advice; empty if none is found.

    Args:
        endpoints: where this node tried to connect, as (host, port).
        role: the kind of the endpoints.
        is_caller: whether this node tried to connect there; otherwise the others tried to connect
            here.
        is_early: the others may not have been started yet, so no port needs to be open.
    """
    look = partial(_first, endpoints, environ, count, role, is_caller=is_caller, is_early=is_early)
    return begin([look], LIMIT_S)().get(0, "")


def first_finding(
    endpoints: Sequence[tuple[str, int]],
    environ: Mapping[str, str],
    *,
    count: int,
    is_listener: bool,
) -> str:
    """As `finding_about`, for nodes that were just started: only what waiting does not change."""
    if all(is_loopback(host) for host, _ in endpoints):
        one = endpoints[0] if len(endpoints) == 1 else None  # several: of `run --hosts`, all here
        return _at_loopback(*one, is_listener=is_listener) if one else ""
    if is_listener and len(endpoints) == 1 and (found := _is_elsewhere(endpoints[0][0])):
        return found
    return finding_about(endpoints, environ, count=count, is_early=True)


def _at_loopback(host: str, port: int, *, is_listener: bool) -> str:
    """Other machines cannot reach it, and what listens there may be another program."""
    endpoint = endpoint_of(host, port)
    holder = "" if is_listener else holder_of(port)
    if holder.startswith("process") and not is_launcher(holder):
        return (
            f"{endpoint} is held by {holder}, which is not a launcher of this job; end"
            " that process, or choose another port (--master-port, or that of --rdzv-endpoint)"
        )
    return (
        f"{endpoint}, the endpoint, can only be reached from this machine; for nodes on"
        " others, give the first node's name or address (--master-addr or --rdzv-endpoint)"
    )


def _is_elsewhere(host: str) -> str:
    """What to say where this node listens for the others, but they look for it elsewhere."""
    try:
        if is_here(host):
            return ""
    except UnknownHostError:
        return ""
    return (
        f"this node waits for the others at {host}, which is not an address of this machine; give"
        " each node its own --node-rank (0 is the first), or correct the address"
        " (--master-addr or --rdzv-endpoint)"
    )


def told_with(error: str, finding: str) -> str:
    """An error's message together with the finding."""
    if not finding:
        return error
    return f"{error.rstrip('.')}; found on {os.uname().nodename}: {finding}"


def _first(
    endpoints: Sequence[tuple[str, int]],
    environ: Mapping[str, str],
    count: int,
    role: str,
    *,
    is_caller: bool,
    is_early: bool,
) -> str:
    hosts = [host for host, _ in endpoints]
    probing = begin([partial(probe_endpoints, 0, endpoints, _CONNECT_S, _NAME_S)], None)
    try:
        node = look_at_network(0, hosts, environ, _NAME_S)
    except (RallypointError, OSError):  # an error is about to be raised already
        return ""
    probes = probing().get(0, [])
    if is_early:
        probes = [each for each in probes if each.outcome is not ConnectOutcome.REFUSED]
    # What a node's name resolves to on the node itself matters only if it is the rendezvous host.
    node = replace(node, own_name=Lookup(host=node.own_name.host, addresses=("0.0.0.0",)))
    cluster = ClusterFacts(
        count=count,
        nodes=(node,),
        endpoint_probes=tuple(replace(each, role=role) for each in probes),
        endpoints=tuple(endpoints),
        port_range=environ.get("RALLYPOINT_PORT_RANGE", ""),
    )
    found = another_interface(node, _by_route(node, hosts, environ), hosts)
    findings = [each for each in diagnose(cluster) if each.level is Severity.RED]
    findings += [found] if found is not None else []
    if findings:
        return findings[0].text(1)
    reached = [each for each in probes if each.outcome is ConnectOutcome.REACHED]
    if is_caller or is_early or not reached:
        return ""
    host, port = reached[0].host, reached[0].port
    return (
        f"this host can connect to {endpoint_of(host, port)}, so a firewall may block the other "
        f"direction; allow TCP from {host} to this host"
    )


def _by_route(node: NodeFacts, hosts: Sequence[str], environ: Mapping[str, str]) -> str:
    """The interface that this node would use if no variable selected another one."""
    if not node.choice.by:
        return node.choice.interface
    for lookup in node.names:
        own = next((each for each in lookup.addresses if each in node.addresses), "")
        if own:  # the others connect to this node
            return node.interface_of(own)
    left = {name: text for name, text in environ.items() if name not in IFNAME_VARIABLES}
    return choose(hosts, left, {each.host: each for each in node.names}).interface
