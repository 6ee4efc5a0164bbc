"""Nodes that were each given the same command connect to the endpoint, and node 0 examines them
all.

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
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from rallypoint.base.address import endpoint_of
from rallypoint.base.json_records import from_json, to_json
from rallypoint.cli.doctor.doctor_flags import DoctorRequest
from rallypoint.cli.doctor.examined_node import ExaminedNode
from rallypoint.cli.doctor.examiner import Examiner, end_all, examine, look_order, own_link
from rallypoint.cluster.remote_shell import OrderLink, send_line
from rallypoint.doctor.check_result import listed
from rallypoint.doctor.checks import DoctorReport, report_of
from rallypoint.doctor.cluster_facts import Absence, ClusterFacts, ConnectOutcome, EndpointProbe
from rallypoint.doctor.collect import LookOrder, is_this_node, look_up
from rallypoint.doctor.probe import CONNECT_S, TokenRefusedError, admit, connect, listen, prove

_RETRY_S = 0.2
_STRANGER_S = 3.0  # for a connection to prove that it knows the token
_EXAMINATION_S = 180.0
_OTHER_TOKEN = "set the same RALLYPOINT_TOKEN, or --token-file, on all nodes"


def examine_at_endpoint(request: DoctorRequest, began: float) -> DoctorReport:
    """The report on all nodes that came, or on this one. It `began` by time.monotonic()."""
    host, port = request.endpoints[0]
    is_host = request.node_rank == 0 if request.is_static else is_this_node(look_up(host))
    if not is_host:
        return _be_guest(request, began)
    try:
        listener = listen(port)
    except OSError:  # the facts about this node will show who holds the port
        return report_of(examine(request), time.monotonic() - began)
    with listener:
        return _be_host(request, listener, began)


# The endpoint's node.


class _Arrivals:
    """Lets nodes in, each in its own thread."""

    def __init__(self, request: DoctorRequest, listener: socket.socket) -> None:
        self.links: list[OrderLink] = []
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
            self.links.append(OrderLink(name, connection))
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
        named = f"; missing: node rank {missing}" if None not in self.ranks else ""
        why = (
            f"{len(self.names)} of {request.fewest} nodes connected to {endpoint_of(host, port)} "
            f"within {request.wait_s:g} s: {listed(tuple(self.names))}{named}"
        )
        advice = (
            "start the same command on the other nodes at the same time (--wait SECONDS waits "
            "longer), and check its output there"
        )
        return [*found, Absence(name="", why=why, advice=advice)]


def _be_host(request: DoctorRequest, listener: socket.socket, began: float) -> DoctorReport:
    """Wait for the others, examine all, and send them the report."""
    arrivals = _Arrivals(request, listener)
    arrivals.wait()
    guests = list(arrivals.links)
    links = [own_link(request, os.uname().nodename), *guests]
    try:
        cluster = Examiner(request, links, is_host=True).examine()
        cluster = _with_absences(cluster, *arrivals.absences())
        report = report_of(cluster, time.monotonic() - began)
        for guest in guests:  # one that does not get it examines itself
            told = to_json(replace(report, facts={}), with_defaults=True)
            guest.tell({"do": "report", "report": told})
    finally:
        end_all(links)
    return report


# The others.


def _be_guest(request: DoctorRequest, began: float) -> DoctorReport:
    """Go to the endpoint and carry out orders; if that fails, examine this node alone."""
    connection, trouble = _find_host(request)
    if connection is not None:
        with connection:
            report = _obey(connection, request)
        if isinstance(report, DoctorReport):
            return report
        trouble = report
    cluster = examine(request)
    if isinstance(trouble, Absence):
        cluster = _with_absences(cluster, trouble)
    else:
        endpoint = (trouble.host, trouble.port)
        others = [each for each in cluster.endpoint_probes if (each.host, each.port) != endpoint]
        cluster = replace(cluster, endpoint_probes=(*others, trouble))
    return report_of(cluster, time.monotonic() - began)


def _with_absences(cluster: ClusterFacts, *absences: Absence) -> ClusterFacts:
    return replace(cluster, absences=(*cluster.absences, *absences))


_STOPPED = Absence(
    name="",
    why="the endpoint's node exited or lost the connection during the examination",
    advice="check its output there",
)


def _find_host(request: DoctorRequest) -> tuple[socket.socket | None, EndpointProbe | Absence]:
    """A connection to the endpoint's node, which has proved its identity; or why there is none."""
    host, port = request.endpoints[0]
    until = time.monotonic() + request.wait_s
    while True:
        lookup = look_up(host)
        outcome, detail = ConnectOutcome.UNKNOWN, lookup.error
        connection: socket.socket | None = None
        for address in lookup.addresses[:2]:
            connection, outcome, detail = connect(address, port, CONNECT_S)
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


def _obey(connection: socket.socket, request: DoctorRequest) -> DoctorReport | Absence:
    """Carry out orders until the report comes; otherwise returns why it never did."""
    connection.settimeout(request.wait_s + _EXAMINATION_S)
    node = ExaminedNode(request.surroundings, has_token=bool(request.token))
    with (
        contextlib.closing(node),
        connection.makefile("rb") as lines,
        contextlib.suppress(OSError, ValueError, KeyError, TypeError),
    ):
        for line in lines:
            order: dict[str, Any] = json.loads(line)
            if order["do"] == "report":
                return from_json(DoctorReport, order["report"])
            if order["do"] == "refuse":
                return from_json(Absence, order["absence"])
            if order["do"] == "look":
                order["order"] = to_json(
                    _by_own_flags(from_json(LookOrder, order["order"]), request)
                )
            send_line(connection, node.perform(order))
    return _STOPPED


def _by_own_flags(order: LookOrder, request: DoctorRequest) -> LookOrder:
    """This node's own command line decides what is inspected here, not the sender of orders."""
    free = request.endpoints[1:]  # the sender of orders listens at the first one
    name = os.uname().nodename
    return look_order(request, order.number, name, endpoints=free, secret=order.secret)
