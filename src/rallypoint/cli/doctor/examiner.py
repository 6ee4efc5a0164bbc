"""Asks all nodes for the time, for facts about themselves, and how they reach each other."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rallypoint.base.address import is_loopback
from rallypoint.base.errors import HostError
from rallypoint.base.json_records import from_json, to_json
from rallypoint.cli.doctor.doctor_flags import DoctorRequest
from rallypoint.cli.doctor.examined_node import GREETING, MODULE, ExaminedNode
from rallypoint.cluster.remote_shell import OrderLink, ShellLink, command_on, version_trouble
from rallypoint.doctor.cluster_facts import Absence, ClusterFacts, EndpointProbe, NodeFacts, Probe
from rallypoint.doctor.collect import LookOrder, begin
from rallypoint.doctor.probe import Target

T = TypeVar("T")

_CLOCK_S = 10.0
_LOOK_S = 30.0
_PROBE_S = 120.0
_CLOCK_TRIES = 3
_LEAVE_S = 2.0
_MOST_ADDRESSES = 4  # of a node: probing an address takes time where nothing answers


def examine(request: DoctorRequest) -> ClusterFacts:
    """Examine the hosts of --hosts, or else this machine alone."""
    links: list[OrderLink] = []
    try:
        for host in request.hosts:
            command = command_on(host.name, request.rsh, MODULE)
            links.append(ShellLink(host.name, command, host.address))
        if not request.hosts:
            links.append(own_link(request))
        return Examiner(request, links).examine()
    finally:
        end_all(links)


def own_link(request: DoctorRequest, name: str = "") -> OrderLink:
    """A link to this process as a node; `name`: what others call it; empty: its host name."""
    ours, theirs = socket.socketpair()
    node = ExaminedNode(request.surroundings, has_token=bool(request.token))
    threading.Thread(target=node.serve, args=(theirs,), daemon=True).start()
    return OrderLink(name, ours)


def end_all(links: Sequence[OrderLink]) -> None:
    """End everything that belongs to these links, here and on the nodes."""
    for link in links:
        link.close()
    for link in links:
        link.end(time.monotonic() + _LEAVE_S)


class Examiner:
    """Examines the nodes at the other ends of `links`, and numbers them in that order.

    `is_host`: this process listens at the first endpoint, and the first link is its own.
    """

    def __init__(
        self, request: DoctorRequest, links: Sequence[OrderLink], *, is_host: bool = False
    ) -> None:
        self._request = request
        self._links = dict(enumerate(links))
        self._is_host = is_host
        self._absences: list[Absence] = []
        # Nodes that are not probed do not listen.
        self._secret = secrets.token_hex(16) if len(links) > 1 else ""

    def examine(self) -> ClusterFacts:
        """All facts. A node that does not answer is left out, and listed among the absences."""
        self._ask_all(_greet, _unstarted)
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
            port_range=request.look.port_range,
        )

    def _clocks(self) -> dict[int, float]:
        """How far each node's clock is ahead of ours, from the quickest of several questions."""

        def ask(_: int, link: OrderLink) -> float:
            best = (float("inf"), 0.0)
            for _try in range(_CLOCK_TRIES):
                began = time.time()
                answer = _answer(link, {"do": "clock"}, _CLOCK_S)
                ended = time.time()
                best = min(best, (ended - began, answer["time_s"] - (began + ended) / 2))
            return best[1]

        return self._ask_all(ask, _silent)

    def _look(self) -> tuple[NodeFacts, ...]:
        request = self._request

        def ask(number: int, link: OrderLink) -> NodeFacts:
            free = request.endpoints[1:] if self._is_host else request.endpoints
            order = look_order(request, number, link.name, endpoints=free, secret=self._secret)
            answer = _answer(link, {"do": "look", "order": to_json(order)}, _LOOK_S)
            return from_json(NodeFacts, answer["facts"])

        return tuple(self._ask_all(ask, _silent).values())

    def _probe(
        self, nodes: tuple[NodeFacts, ...]
    ) -> tuple[tuple[Probe, ...], tuple[EndpointProbe, ...]]:
        targets = [_target(node) for node in nodes if node.probe_port]

        def ask(number: int, link: OrderLink) -> tuple[list[Probe], list[EndpointProbe]]:
            others = [each for each in targets if each.number != number]
            order = {"do": "probe", "targets": to_json(others), "secret": self._secret}
            # A loopback endpoint means a different machine on each node.
            shared = [each for each in self._request.endpoints if not is_loopback(each[0])]
            answer = _answer(link, {**order, "endpoints": shared}, _PROBE_S)
            return (
                [from_json(Probe, each) for each in answer["probes"]],
                [from_json(EndpointProbe, each) for each in answer["endpoints"]],
            )

        if len(nodes) < 2 and not self._request.endpoints:
            return (), ()
        found = self._ask_all(ask, _silent).values()
        probes = tuple(each for one, _ in found for each in one)
        return probes, tuple(each for _, one in found for each in one)

    def _hosts(self, nodes: tuple[NodeFacts, ...]) -> Mapping[str, int]:
        """The numbers of the nodes known by name."""
        names = {link.name for link in self._links.values()} if self._request.hosts else set()
        found = {node.name: node.number for node in nodes if node.name in names}
        if self._is_host:
            found.setdefault(self._request.endpoints[0][0], 0)
        return found

    def _ask_all(
        self, ask: Callable[[int, OrderLink], T], absence: Callable[[OrderLink, str], Absence]
    ) -> dict[int, T]:
        """The answers of all nodes, asked at once; one that fails to answer is not asked again."""

        def answer(number: int, link: OrderLink) -> T | HostError:
            try:
                return ask(number, link)
            except HostError as error:
                return error

        links = list(self._links.items())
        answers = begin([partial(answer, *each) for each in links], None)()
        found: dict[int, T] = {}
        for position, told in sorted(answers.items()):
            number, link = links[position]
            if isinstance(told, HostError):
                del self._links[number]
                self._absences.append(absence(link, str(told)))
            else:
                found[number] = told
        return found


def _answer(link: OrderLink, order: Mapping[str, object], wait_s: float) -> dict[str, Any]:
    """The answer of a node that has carried out the order."""
    answer = link.ask(order, wait_s)
    if "error" in answer:
        raise HostError(str(answer["error"]))
    return answer


def _greet(_: int, link: OrderLink) -> None:
    """Wait until the program that ssh starts there answers; other nodes have answered already."""
    if isinstance(link, ShellLink):
        link.greet(GREETING)
        if trouble := version_trouble(link.found):
            raise HostError(trouble)


def look_order(
    request: DoctorRequest,
    number: int,
    name: str,
    *,
    endpoints: Sequence[tuple[str, int]],
    secret: str,
) -> LookOrder:
    """The order for a node to gather its facts; `name` is what others call it, if anything."""
    others = [host.address for host in request.hosts if host.address != name]
    own = request.hosts[number].workers if number < len(request.hosts) else ""
    return replace(
        request.look,
        number=number,
        name=name,
        hosts=tuple(dict.fromkeys([*others, *(host for host, _ in request.endpoints)])),
        workers=own or request.look.workers,
        endpoints=tuple(endpoints),
        secret=secret,
    )


def _unstarted(link: OrderLink, why: str) -> Absence:
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


def _silent(link: OrderLink, why: str) -> Absence:
    """A node that answered before, and no longer does."""
    return Absence(
        name=link.name,
        why=f"it does not answer: {' '.join(why.removeprefix(f'{link.name}: ').split())}",
        advice="check whether that machine is overloaded or has lost its network",
    )


def _target(node: NodeFacts) -> Target:
    """The addresses at which others should reach it: first the one that it gives to others."""
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
