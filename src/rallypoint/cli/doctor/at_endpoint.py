"""Nodes that were each given the same command meet at the endpoint, and node 0 examines them all.

    a guest --> the challenge of the token --> who it is --> orders, answers --> the report

The endpoint's node waits a few seconds for the others. A node that cannot reach it examines itself,
and reports what it finds on its way there.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from rallypoint.base.address import endpoint_of
from rallypoint.base.json_records import from_json, to_json
from rallypoint.cli.doctor.arguments import DoctorRequest
from rallypoint.cli.doctor.examined_node import ExaminedNode
from rallypoint.cli.doctor.examiner import Examiner, look_order, with_absences
from rallypoint.cli.doctor.node_links import NodeLink, OwnLink, SocketLink, send_line
from rallypoint.cli.doctor.printed import report_of
from rallypoint.doctor.check_result import listed
from rallypoint.doctor.cluster_facts import Absence, ClusterFacts, ConnectOutcome, EndpointProbe
from rallypoint.doctor.collect import LookOrder
from rallypoint.doctor.listener import TokenRefusedError, admit, listen
from rallypoint.doctor.lookups import is_this_node, look_up
from rallypoint.doctor.probe import CONNECT_S, prove

_RETRY_S = 0.2
_STRANGER_S = 3.0  # for a connection to prove that it knows the token
_EXAMINATION_S = 180.0
_OTHER_TOKEN = "set the same RALLYPOINT_TOKEN, or --token-file, on all nodes"


def examine_at_endpoint(request: DoctorRequest, began: float) -> dict[str, Any]:
    """The report on all nodes that came, or on this one.

    Args:
        began: the value of time.monotonic() when the command started.
    """
    host, port = request.endpoints[0]
    is_host = request.node_rank == 0 if request.is_static else is_this_node(look_up(host))
    if not is_host:
        return _be_guest(request, began)
    try:
        listener = listen(port)
    except OSError:  # the facts about this node will show who holds the port
        return report_of(_examine_alone(request), time.monotonic() - began)
    with listener:
        return _be_host(request, listener, began)


def own_node(request: DoctorRequest) -> ExaminedNode:
    """This node, as the flags describe it."""
    return ExaminedNode(request.surroundings, has_token=bool(request.token))


def _examine_alone(request: DoctorRequest) -> ClusterFacts:
    with contextlib.closing(OwnLink(own_node(request))) as link:
        return Examiner(request, [link]).examine()


# The endpoint's node.


class _Arrivals:
    """Lets nodes in, each in a thread of its own."""

    def __init__(self, request: DoctorRequest, listener: socket.socket) -> None:
        self.links: list[SocketLink] = []
        self.ranks: list[int | None] = [request.node_rank]
        self.names: list[str] = [os.uname().nodename]
        self.complaints: list[Absence] = []
        self._refused: set[str] = set()  # addresses; repeated attempts count once
        self._request = request
        self._listener = listener
        self._change = threading.Condition()

    def wait(self) -> None:
        """Wait until all nodes have arrived, or the time is up."""
        threading.Thread(target=self._accept, daemon=True).start()
        with self._change:
            self._change.wait_for(lambda: self._count >= self._request.most, self._request.wait_s)

    @property
    def _count(self) -> int:
        return len(self.names) + len(self._refused)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            host = str(address[0]).removeprefix("::ffff:")
            threading.Thread(target=self._meet, args=(connection, host), daemon=True).start()

    def _meet(self, connection: socket.socket, host: str) -> None:
        try:
            connection.settimeout(_STRANGER_S)
            admit(connection, self._request.token)
            told = json.loads(connection.makefile("rb").readline(1 << 16))
            found = (str(told["version"]), str(told["name"]), told["node_rank"])
        except TokenRefusedError:
            why = (
                f"the node at {host} has a different token than this one, or only one of them "
                "has a token"
            )
            absence = Absence(name="", why=why, advice=_OTHER_TOKEN, check=10)
            self._refuse(connection, host, absence)
            return
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()
            return
        theirs, name, rank = found
        if theirs != version("rallypoint"):
            why = f"{name} has Rallypoint {theirs}, and {self.names[0]} {version('rallypoint')}"
            advice = "install the same version on all nodes"
            self._refuse(connection, host, Absence(name="", why=why, advice=advice, check=7))
            return
        with self._change:
            if rank is not None and rank in self.ranks:
                why = f"its --node-rank is {rank}, which another node also uses"
                advice = "give each node a different number, starting at 0"
                self.complaints.append(Absence(name=name, why=why, advice=advice))
            self.links.append(SocketLink(connection, name))
            self.names.append(name)
            self.ranks.append(rank)
            self._change.notify()

    def _refuse(self, connection: socket.socket, host: str, absence: Absence) -> None:
        with connection, contextlib.suppress(OSError):
            send_line(connection, {"do": "refuse", "absence": to_json(absence)})
        with self._change:
            if host not in self._refused:
                self._refused.add(host)
                self.complaints.append(absence)
            self._change.notify()

    def absences(self) -> list[Absence]:
        """The nodes that were refused, and those that did not come."""
        request = self._request
        found = list(self.complaints)
        if self._count >= request.fewest:
            return found
        host, port = request.endpoints[0]
        ranks = [rank for rank in range(1, request.most) if rank not in self.ranks]
        missing = ", ".join(str(rank) for rank in ranks[:8])
        named = f"; missing is node rank {missing}" if None not in self.ranks else ""
        why = (
            f"{len(self.names)} of {request.fewest} nodes connected to {endpoint_of(host, port)} "
            f"within {request.wait_s:g} s: {listed(tuple(self.names))}{named}"
        )
        advice = (
            "start the same command on the other nodes at the same time (--wait SECONDS waits "
            "longer), and check its output there"
        )
        return [*found, Absence(name="", why=why, advice=advice)]


def _be_host(request: DoctorRequest, listener: socket.socket, began: float) -> dict[str, Any]:
    """Wait for the others, examine all, and send them the report."""
    arrivals = _Arrivals(request, listener)
    arrivals.wait()
    own = OwnLink(own_node(request), os.uname().nodename)
    guests = list(arrivals.links)
    links: list[NodeLink] = [own, *guests]
    try:
        cluster = Examiner(request, links, is_host=True).examine()
        cluster = with_absences(cluster, arrivals.absences())
        report = report_of(cluster, time.monotonic() - began)
        for guest in guests:
            guest.tell({"do": "report", "report": {**report, "facts": {}}})
    finally:
        for link in links:
            link.close()
    return report


# The others.


def _be_guest(request: DoctorRequest, began: float) -> dict[str, Any]:
    """Go to the endpoint and carry out orders; if that fails, examine this node alone."""
    node = own_node(request)
    try:
        connection, trouble = _find_host(request)
        if connection is not None:
            with connection:
                report = _obey(connection, node, request)
            if isinstance(report, dict):
                return report
            trouble = report
    finally:
        node.close()
    cluster = _examine_alone(request)
    if isinstance(trouble, Absence):
        return report_of(with_absences(cluster, [trouble]), time.monotonic() - began)
    others = [each for each in cluster.endpoint_probes if (each.host, each.port) != _key(trouble)]
    cluster = replace(cluster, endpoint_probes=(*others, trouble))
    return report_of(cluster, time.monotonic() - began)


_STOPPED = Absence(
    name="",
    why="the endpoint's node exited or lost the connection during the examination",
    advice="check its output there",
)


def _key(probe: EndpointProbe) -> tuple[str, int]:
    return probe.host, probe.port


def _find_host(request: DoctorRequest) -> tuple[socket.socket | None, EndpointProbe | Absence]:
    """A connection to the endpoint's node, which has proved its identity; or the reason why there
    is none.
    """
    host, port = request.endpoints[0]
    until = time.monotonic() + request.wait_s
    while True:
        lookup = look_up(host)
        outcome, detail = ConnectOutcome.UNKNOWN, lookup.error
        connection: socket.socket | None = None
        for address in lookup.addresses[:2]:
            connection, outcome, detail = _call(address, port)
            if connection is not None:
                break
        if connection is not None:
            trouble = _introduce(connection, request)
            if trouble is None:
                return connection, _STOPPED
            connection.close()
            if isinstance(trouble, Absence):
                return None, trouble
            outcome, detail = trouble, ""
        if time.monotonic() > until:
            return None, EndpointProbe(
                source=0, host=host, port=port, outcome=outcome, detail=detail
            )
        time.sleep(_RETRY_S)


def _call(address: str, port: int) -> tuple[socket.socket | None, ConnectOutcome, str]:
    try:
        return socket.create_connection((address, port), CONNECT_S), ConnectOutcome.REACHED, ""
    except ConnectionRefusedError as error:
        return None, ConnectOutcome.REFUSED, error.strerror or ""
    except TimeoutError:
        return None, ConnectOutcome.DROPPED, f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return None, ConnectOutcome.UNREACHABLE, error.strerror or str(error)


def _introduce(
    connection: socket.socket, request: DoctorRequest
) -> Absence | ConnectOutcome | None:
    """Prove knowledge of the token, and introduce this node; None if that went well."""
    connection.settimeout(_STRANGER_S)
    told = {"version": version("rallypoint"), "name": os.uname().nodename}
    try:
        if not prove(connection, request.token):
            host, port = request.endpoints[0]
            why = f"the node at {endpoint_of(host, port)} has a different token than this one"
            return Absence(name="", why=why, advice=_OTHER_TOKEN, check=10)
        send_line(connection, {**told, "node_rank": request.node_rank})
    except OSError:
        return ConnectOutcome.STRANGER
    return None


def _obey(
    connection: socket.socket, node: ExaminedNode, request: DoctorRequest
) -> dict[str, Any] | Absence:
    """Carry out orders until the report comes; otherwise returns why it never did."""
    connection.settimeout(request.wait_s + _EXAMINATION_S)
    with (
        connection.makefile("rb") as lines,
        contextlib.suppress(OSError, ValueError, KeyError, TypeError),
    ):
        for line in lines:
            order: Mapping[str, Any] = json.loads(line)
            if order["do"] == "report":
                report: dict[str, Any] = order["report"]
                return report
            if order["do"] == "refuse":
                return from_json(Absence, order["absence"])
            send_line(connection, node.perform(_by_own_flags(order, request)))
    return _STOPPED


def _by_own_flags(order: Mapping[str, Any], request: DoctorRequest) -> Mapping[str, Any]:
    """This node's own command line decides what is inspected here, not the sender of orders."""
    if order["do"] != "look":
        return order
    number, name = from_json(LookOrder, order["look"]).number, os.uname().nodename
    free = request.endpoints[1:]  # the sender of orders listens at the first one
    return look_order(request, number, name, endpoints=free, secret=str(order["secret"]))
