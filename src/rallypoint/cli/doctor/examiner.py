"""Asks all nodes for the time, for facts about themselves, and how they reach each other."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import HostError
from rallypoint.base.json_records import from_json, to_json
from rallypoint.cli.doctor.arguments import DoctorRequest
from rallypoint.cli.doctor.node_links import NodeLink
from rallypoint.doctor.cluster_facts import (
    Absence,
    ClusterFacts,
    EndpointProbe,
    NodeFacts,
    Probe,
)
from rallypoint.doctor.collect import LookOrder
from rallypoint.doctor.probe import Target

_CLOCK_S = 10.0
_LOOK_S = 30.0
_PROBE_S = 120.0
_CLOCK_TRIES = 3
_MOST_ADDRESSES = 4  # of a node: probing an address takes time where nothing answers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answers:
    """Answers by node number, and the reason for each node that gave none."""

    found: dict[int, dict[str, Any]]
    absences: list[Absence]


class Examiner:
    """Examines the nodes at the other ends of `links`, and numbers them in that order.

    Args:
        is_host: this process listens at the first endpoint, and the first link is its own.
    """

    def __init__(
        self, request: DoctorRequest, links: Sequence[NodeLink], *, is_host: bool = False
    ) -> None:
        self._request = request
        self._links = dict(enumerate(links))
        self._is_host = is_host
        self._absences: list[Absence] = []
        # Nodes that are not probed do not listen.
        self._secret = secrets.token_hex(16) if len(links) > 1 else ""

    def examine(self) -> ClusterFacts:
        """All facts. A node that does not answer is left out, and listed among the absences."""
        self._ask_all(lambda number, link: link.begin() or {}, _unstarted)
        clocks_s = self._clocks()
        nodes = self._look()
        probes, at_endpoints = self._probe(nodes)
        request = self._request
        return ClusterFacts(
            count=max(request.most, len(nodes)),
            nodes=nodes,
            probes=probes,
            endpoint_probes=at_endpoints,
            absences=tuple(self._absences),
            clocks_s=clocks_s,
            hosts=self._hosts(nodes),
            endpoints=request.endpoints,
            draws_token=bool(request.hosts),
            port_range=request.port_range,
        )

    def _clocks(self) -> dict[int, float]:
        """How far each node's clock is ahead of ours, from the quickest of several questions."""

        def ask(_: int, link: NodeLink) -> dict[str, Any]:
            best = (float("inf"), 0.0)
            for _try in range(_CLOCK_TRIES):
                began = time.time()
                answer = link.ask({"do": "clock"}, _CLOCK_S)
                ended = time.time()
                best = min(best, (ended - began, answer["time_s"] - (began + ended) / 2))
            return {"ahead_s": best[1]}

        found = self._ask_all(ask, _silent)
        return {number: each["ahead_s"] for number, each in found.items()}

    def _look(self) -> tuple[NodeFacts, ...]:
        request = self._request

        def ask(number: int, link: NodeLink) -> dict[str, Any]:
            free = request.endpoints[1:] if self._is_host else request.endpoints
            order = look_order(request, number, link.name, endpoints=free, secret=self._secret)
            return link.ask(order, _LOOK_S)

        found = self._ask_all(ask, _silent)
        return tuple(from_json(NodeFacts, each["facts"]) for _, each in sorted(found.items()))

    def _probe(
        self, nodes: tuple[NodeFacts, ...]
    ) -> tuple[tuple[Probe, ...], tuple[EndpointProbe, ...]]:
        targets = [_target(node) for node in nodes if node.probe_port]

        def ask(number: int, link: NodeLink) -> dict[str, Any]:
            others = [each for each in targets if each.number != number]
            order = {"do": "probe", "targets": to_json(others), "secret": self._secret}
            # A loopback endpoint means a different machine on each node.
            places = [each for each in self._request.endpoints if not is_loopback(each[0])]
            return link.ask({**order, "endpoints": places}, _PROBE_S)

        if len(nodes) < 2 and not self._request.endpoints:
            return (), ()
        found = sorted(self._ask_all(ask, _silent).items())
        probes = [from_json(Probe, each) for _, answer in found for each in answer["probes"]]
        at_endpoints = [
            from_json(EndpointProbe, each) for _, answer in found for each in answer["endpoints"]
        ]
        return tuple(probes), tuple(at_endpoints)

    def _hosts(self, nodes: tuple[NodeFacts, ...]) -> Mapping[str, int]:
        """The numbers of the nodes known by name."""
        names = {link.name for link in self._links.values()} if self._request.hosts else set()
        found = {node.name: node.number for node in nodes if node.name in names}
        if self._is_host:
            found.setdefault(self._request.endpoints[0][0], 0)
        return found

    def _ask_all(
        self,
        ask: Callable[[int, NodeLink], dict[str, Any]],
        absence: Callable[[NodeLink, str], Absence],
    ) -> dict[int, dict[str, Any]]:
        """The answers of all nodes, asked at once; a node that fails to answer is not asked
        again.
        """
        found: dict[int, dict[str, Any]] = {}
        failed: dict[int, str] = {}

        def work(number: int, link: NodeLink) -> None:
            try:
                answer = ask(number, link)
            except HostError as error:
                failed[number] = str(error)
                return
            if "error" in answer:
                failed[number] = str(answer["error"])
            else:
                found[number] = answer

        threads = [
            threading.Thread(target=work, args=each, daemon=True) for each in self._links.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, why in sorted(failed.items()):
            link = self._links.pop(number)
            self._absences.append(absence(link, why))
        return found


def look_order(
    request: DoctorRequest,
    number: int,
    name: str,
    *,
    endpoints: Sequence[tuple[str, int]],
    secret: str,
) -> dict[str, Any]:
    """The order for a node to gather its facts.

    Args:
        name: what others call it; empty: use its host name.
        endpoints: those that must be free for it to listen at, if one of them is this node.
        secret: what nodes that probe it must know.
    """
    others = [host.address for host in request.hosts if host.address != name]
    own = request.hosts[number].workers if number < len(request.hosts) else ""
    order = LookOrder(
        number=number,
        name=name,
        hosts=tuple(dict.fromkeys([*others, *(host for host, _ in request.endpoints)])),
        paths=request.paths,
        script=request.script,
        log_dir=request.log_dir,
        local_addr=request.local_addr,
        workers=own or request.workers,
    )
    return {
        "do": "look",
        "look": to_json(order),
        "secret": secret,
        # On a host reached by ssh, the environment of a job must be set up first; other nodes have
        # it already.
        "environ": dict(request.environ) if request.hosts else {},
        "directory": os.getcwd() if request.hosts else "",
        "port_range": request.port_range,
        "endpoints": endpoints,
    }


def _unstarted(link: NodeLink, why: str) -> Absence:
    """A host on which no program could be started."""
    what = " ".join(why.removeprefix(f"{link.name}: ").split())
    if why.startswith("it has Rallypoint"):
        what, _, advice = why.partition("; ")
        return Absence(name=link.name, why=what, advice=advice, check=7)
    return Absence(
        name=link.name,
        why=f"cannot start anything there: {what}",
        advice=(
            f"check that `ssh {link.name} true` (or the command of --rsh) works without a "
            "password, and that the same Python is installed there"
        ),
    )


def _silent(link: NodeLink, why: str) -> Absence:
    """A node that answered before, and no longer does."""
    return Absence(
        name=link.name,
        why=f"it does not answer: {' '.join(why.removeprefix(f'{link.name}: ').split())}",
        advice="check whether that machine is overloaded or has lost its network",
    )


def _target(node: NodeFacts) -> Target:
    """The addresses at which others should reach it: the one that it gives to others, or else those
    of other interfaces.
    """
    address = node.choice.address
    others = tuple(
        each
        for interface in node.interfaces
        for each in interface.addresses
        if address not in interface.addresses
    )
    if not address or is_loopback(address):
        address, *rest = others or ("127.0.0.1",)
        others = tuple(rest)
    others = others[:_MOST_ADDRESSES]
    return Target(number=node.number, address=address, port=node.probe_port, others=others)


def with_absences(cluster: ClusterFacts, absences: Sequence[Absence]) -> ClusterFacts:
    """The same facts with more absent nodes."""
    return replace(cluster, absences=(*cluster.absences, *absences))
