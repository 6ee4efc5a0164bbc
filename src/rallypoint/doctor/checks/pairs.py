"""Checks 3, 5 and 6: which nodes reach each other, with which messages, and how fast. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from enum import Enum

from rallypoint.doctor.check_result import Finding, Pair, Severity, listed
from rallypoint.doctor.cluster_facts import SLOW_MBIT_S, ClusterFacts, ConnectOutcome, Probe

_SLOW_SHARE = 0.1  # of the speed of most links
LONE_MBIT_S = 100.0  # for two nodes, whose link cannot be compared with others
_LATE_TIMES, _LATE_US = 10.0, 20e3


class Shape(Enum):
    """What the pairs of a group have in common."""

    AROUND = "all pairs of one node"
    INTO = "all that call one node"
    OUT = "all that one node calls"
    SOME = "some that call one node"


_UNCONNECTED = {
    Shape.AROUND: "it cannot connect to any other node, nor they to it",
    Shape.INTO: "no other node can connect to it",
    Shape.OUT: "it cannot connect to any other node",
}
_DIRECTIONS = {Shape.AROUND: "between it and the others", Shape.INTO: "to it", Shape.OUT: "from it"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairGroup:
    """Pairs with one cause; `node` is the one that they share."""

    shape: Shape
    node: int
    pairs: frozenset[Pair]

    @property
    def sources(self) -> list[int]:
        """The nodes that try to connect."""
        return sorted({source for source, _ in self.pairs})


def grouped(
    pairs: Iterable[Pair], numbers: Iterable[int], *, is_loose: bool = False
) -> list[PairGroup]:
    """The smallest set of groups that covers the pairs, preferring whole nodes.

    Args:
        is_loose: if all pairs of a node in one direction fail, those in the other direction count
            as the same cause, even if some are missing.
    """
    left, nodes = set(pairs), sorted(numbers)
    found = []
    while left:
        whole = [
            PairGroup(shape=shape, node=node, pairs=frozenset(members))
            for node in nodes
            for shape, members in _shapes(node, nodes)
            if members <= left and (len(nodes) > 2 or shape is Shape.AROUND)
        ]
        if whole:
            best = max(whole, key=lambda group: len(group.pairs))
            also = {pair for pair in left if best.node in pair}
            if is_loose and also > best.pairs:
                best = PairGroup(shape=Shape.AROUND, node=best.node, pairs=frozenset(also))
        else:
            target = min(target for _, target in left)
            members = {pair for pair in left if pair[1] == target}
            best = PairGroup(shape=Shape.SOME, node=target, pairs=frozenset(members))
        found.append(best)
        left -= best.pairs
    return found


def _shapes(node: int, nodes: list[int]) -> list[tuple[Shape, set[Pair]]]:
    into = {(other, node) for other in nodes if other != node}
    out = {(node, other) for other in nodes if other != node}
    return [(Shape.AROUND, into | out), (Shape.INTO, into), (Shape.OUT, out)]


def connections(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Check 3: pairs that cannot connect."""
    failed = {
        probe.pair: probe
        for probe in cluster.probes
        if probe.outcome is not ConnectOutcome.REACHED
        and not probe.other_address
        and probe.pair not in explained
    }
    kinds: dict[tuple[ConnectOutcome, str], set[Pair]] = {}
    for pair, probe in failed.items():
        kinds.setdefault((probe.outcome, probe.detail), set()).add(pair)
    for (outcome, detail), pairs in kinds.items():
        for group in grouped(pairs, [node.number for node in cluster.nodes]):
            where, what = _unconnected(cluster, group, set(failed))
            what = f"{what} ({_why(outcome, detail)})"
            advice = _advice(cluster, group, outcome)
            yield Finding(Severity.RED, 3, where, what, advice, group.pairs)


def _why(outcome: ConnectOutcome, detail: str) -> str:
    """The system's error text, which is enough unless another program answered."""
    if outcome is ConnectOutcome.STRANGER and detail:
        return f"{outcome.value}: {detail}"
    return detail or outcome.value


def _unconnected(
    cluster: ClusterFacts, group: PairGroup, failed: Set[Pair]
) -> tuple[tuple[str, ...], str]:
    where = _where(cluster, group)
    if len(where) == 2 and group.shape is Shape.AROUND:
        return where, "neither can connect to the other"
    if group.shape in _UNCONNECTED:
        return where, _UNCONNECTED[group.shape]
    name = cluster.name(group.node)
    back = [source for source in group.sources if (group.node, source) not in failed]
    one_way = f", though {name} can connect the other way" if back == group.sources else ""
    return where, f"cannot connect to {name}{one_way}"


def _advice(cluster: ClusterFacts, group: PairGroup, outcome: ConnectOutcome) -> str:
    ports = f"ports {cluster.port_range}" if cluster.port_range else "all ports from 1024 on"
    bound = "" if cluster.port_range else " (or fewer, with --port-range)"
    name = cluster.name(group.node)
    if outcome is ConnectOutcome.STRANGER:
        return "check whether another machine has the same address"
    if outcome is ConnectOutcome.UNREACHABLE:
        return (
            "check the routes between them (ip route), or choose a network that all share with"
            " RALLYPOINT_SOCKET_IFNAME"
        )
    if group.shape is Shape.OUT:
        return f"allow {name} outgoing TCP to {ports} of the others{bound}, in its firewall too"
    sources = "the other nodes" if group.shape is not Shape.SOME else ""
    sources = sources or listed(_names(cluster, group.sources))
    return f"allow TCP from {sources} to {ports} of {name}{bound} in the firewalls of both"


def large_messages(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Check 5: small messages arrive, large ones do not."""
    pairs = {probe.pair for probe in cluster.probes if probe.stalls and probe.pair not in explained}
    for group in grouped(pairs, [node.number for node in cluster.nodes], is_loose=True):
        where, direction = _direction(cluster, group)
        interfaces = [each.choice.interface for each in cluster.nodes if each.number == group.node]
        what = (
            f"messages {direction} that are larger than a packet of the network get lost, while"
            " small ones arrive"
        )
        advice = (
            "some link carries only packets smaller than the MTU: lower the MTU on all nodes (ip"
            f" link set {''.join(interfaces) or 'eth0'} mtu 1400, say), or raise it on the switches"
            " between"
        )
        yield Finding(Severity.RED, 5, where, what, advice, group.pairs)


def slow_links(cluster: ClusterFacts, explained: Set[Pair]) -> Iterator[Finding]:
    """Check 6: links that are much slower than the others."""
    measured = [probe for probe in cluster.probes if probe.pair not in explained]
    rates = sorted(probe.mbit_s for probe in measured if probe.mbit_s)
    if len(cluster.nodes) == 2:
        yield from _slow_between_two(cluster, measured)
        return
    usual = rates[3 * len(rates) // 4] if rates else 0.0
    slow = {
        probe.pair: probe.mbit_s
        for probe in measured
        if 0 < probe.mbit_s < min(SLOW_MBIT_S, _SLOW_SHARE * usual)
    }
    for group in grouped(slow, [node.number for node in cluster.nodes], is_loose=True):
        where, direction = _direction(cluster, group)
        rate = min(slow[pair] for pair in group.pairs)
        what = f"data {direction} moves at {_rate(rate)}, while other links reach {_rate(usual)}"
        advice = (
            "check the cable, the switch port, the negotiated speed (ethtool) and limits on that"
            " link (tc qdisc), or leave that node out"
        )
        yield Finding(Severity.RED, 6, where, what, advice, group.pairs)
    yield from _late(cluster, measured)


def _slow_between_two(cluster: ClusterFacts, measured: list[Probe]) -> Iterator[Finding]:
    rates = [probe.mbit_s for probe in measured if 0 < probe.mbit_s < LONE_MBIT_S]
    if rates:
        where = tuple(node.name for node in cluster.nodes)
        what = f"data between them moves at {_rate(min(rates))}"
        advice = (
            "if the network is meant to be faster, check the negotiated speed (ethtool) and limits"
            " on the link (tc qdisc)"
        )
        yield Finding(Severity.YELLOW, 6, where, what, advice)


def _late(cluster: ClusterFacts, measured: list[Probe]) -> Iterator[Finding]:
    times = sorted(probe.latency_us for probe in measured if probe.latency_us)
    usual = times[len(times) // 4] if times else 0.0
    late = {
        probe.pair: probe.latency_us
        for probe in measured
        if probe.latency_us > max(_LATE_US, _LATE_TIMES * usual)
    }
    for group in grouped(late, [node.number for node in cluster.nodes], is_loose=True):
        where, direction = _direction(cluster, group)
        most = max(late[pair] for pair in group.pairs)
        what = (
            f"a small message {direction} and its answer take {most / 1e3:.0f} ms, while others"
            f" take {usual / 1e3:.1f} ms"
        )
        advice = "check whether that node is at another site, or busy"
        yield Finding(Severity.YELLOW, 6, where, what, advice)


def _direction(cluster: ClusterFacts, group: PairGroup) -> tuple[tuple[str, ...], str]:
    """The nodes that a finding is about, and the direction."""
    where = _where(cluster, group)
    if len(where) == 2 and group.shape is Shape.AROUND:
        return where, "between them"
    return where, _DIRECTIONS.get(group.shape, f"to {cluster.name(group.node)}")


def _where(cluster: ClusterFacts, group: PairGroup) -> tuple[str, ...]:
    """The nodes to name: the one that its pairs share, both of two, or those that call it."""
    if len(cluster.nodes) == 2 and group.shape is Shape.AROUND:
        return tuple(node.name for node in cluster.nodes)
    if group.shape is Shape.SOME:
        return _names(cluster, group.sources)
    return (cluster.name(group.node),)


def _names(cluster: ClusterFacts, numbers: list[int]) -> tuple[str, ...]:
    return tuple(cluster.name(number) for number in numbers)


def _rate(mbit_s: float) -> str:
    return f"{mbit_s / 1000:.1f} Gbit/s" if mbit_s >= 1000 else f"{mbit_s:.3g} Mbit/s"
