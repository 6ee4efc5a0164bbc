"""Checks 9, 10 and 16: where the job was started, its token, and harmful variables. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Set

from rallypoint.base.address import is_loopback
from rallypoint.doctor.check_result import Finding, Pair, Severity, listed
from rallypoint.doctor.cluster_facts import ClusterFacts, NodeFacts
from rallypoint.doctor.settings import PROXIES


def surroundings(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 9: what the scheduler says."""
    for node in cluster.nodes:
        found = node.surroundings
        text = found.wrong or found.note
        if text:
            what, _semicolon, advice = text.partition("; ")
            yield Finding(
                level=Severity.RED if found.wrong else Severity.YELLOW,
                check=9,
                where=(node.name,),
                what=what.rstrip("."),
                advice=advice.rstrip(".") or "`rallypoint where` shows what is recognised",
            )


def token(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 10: whether there is a token. That all nodes have the same is proved when they meet."""
    if not cluster.is_shared or cluster.draws_token:
        return
    without = tuple(node.name for node in cluster.nodes if not node.has_token)
    if without:
        yield Finding(
            level=Severity.YELLOW,
            check=10,
            where=without,
            what="no token is set, so anyone who can connect to the port can join the job",
            advice="set the same RALLYPOINT_TOKEN, or --token-file, on all nodes",
        )


def bad_settings(cluster: ClusterFacts, _: Set[Pair]) -> Iterator[Finding]:
    """Check 16: variables that are known to do harm."""
    for node in cluster.nodes:
        if cluster.is_shared:
            yield from _proxy(cluster, node)
        for applies, what, advice in _bad(node):
            if applies:
                yield Finding(
                    level=Severity.YELLOW, check=16, where=(node.name,), what=what, advice=advice
                )


def _proxy(cluster: ClusterFacts, node: NodeFacts) -> Iterator[Finding]:
    """Worded alike on all nodes, so all other nodes are named."""
    caught = [
        host
        for host in [*cluster.hosts, *(host for host, _ in cluster.endpoints)]
        if not is_loopback(host) and host not in node.bypasses_proxy
        and any(lookup.host == host for lookup in node.names)
    ]  # fmt: skip
    names = [each for each in node.settings if each.lower() in PROXIES]
    if names and caught:
        every = tuple(dict.fromkeys([*cluster.hosts, *caught]))
        yield Finding(
            level=Severity.RED,
            check=16,
            where=(node.name,),
            what=f"{names[0]}={node.settings[names[0]]} sends requests to the job's nodes through"
            " that proxy",
            advice=f"set no_proxy={','.join(every) if len(every) <= 8 else listed(every)}, or unset"
            f" {' '.join(names)}",
        )


def _bad(node: NodeFacts) -> list[tuple[bool, str, str]]:
    """For each check of a variable: whether it applies, the finding, and the advice."""
    settings, devices = node.settings, node.devices
    gloo = settings.get("GLOO_SOCKET_IFNAME", "")
    blocking = [name for name in ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
                if settings.get(name) == "1"]  # fmt: skip
    return [
        (
            settings.get("NCCL_IB_DISABLE") == "1" and devices.has_infiniband,
            "NCCL_IB_DISABLE=1 keeps NCCL from using the node's InfiniBand",
            "unset it",
        ),
        (
            settings.get("NCCL_P2P_DISABLE") == "1" and devices.visible > 1,
            "NCCL_P2P_DISABLE=1 makes the GPUs of a node exchange data through main memory",
            "unset it, unless it works around a known fault of this machine",
        ),
        (
            bool(blocking),
            f"{' and '.join(blocking)}=1 makes each NCCL call block, which is slow",
            "unset it; timeouts are detected without it",
        ),
        (
            gloo.startswith("^") or "," in gloo,
            f"GLOO_SOCKET_IFNAME={gloo} is a pattern, which gloo does not understand",
            "name one interface, or set RALLYPOINT_SOCKET_IFNAME instead",
        ),
    ]
