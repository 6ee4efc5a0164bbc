"""One node of an examination: carries out the examiner's orders.

    python -P -m rallypoint.cli.doctor.examined_node       started by ssh, or by what --rsh names

    clock   what time it is
    look    facts about this node; from then on it listens for probes
    probe   how well it reaches the others

Orders are read from standard input and answers written to standard output, as JSON, one to a line.
When the input ends, for whatever reason, so does this program.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rallypoint.base.errors import HostError, RallypointError
from rallypoint.base.json_records import from_json, to_json
from rallypoint.base.port_range import VARIABLE as PORT_RANGE
from rallypoint.base.port_range import read_port_range
from rallypoint.cluster.remote_shell import greeting, send_line
from rallypoint.doctor.cluster_facts import NOWHERE, NodeFacts, PathLook, PathState, Surroundings
from rallypoint.doctor.collect import LookOrder, is_this_node, look, take_ports
from rallypoint.doctor.paths import look_at_path
from rallypoint.doctor.probe import (
    ProbeListener,
    Target,
    listen,
    probe_all,
    probe_endpoints,
    secret_of,
)
from rallypoint.launch.inspection.entries import running_agents
from rallypoint.launch.job import TOKEN

GREETING = "rallypoint doctor"  # anything printed before it comes from a login shell
MODULE = "rallypoint.cli.doctor.examined_node"


class ExaminedNode:
    """Carries out orders. Unless `has_token`, RALLYPOINT_TOKEN says whether it has the job's."""

    def __init__(self, surroundings: Surroundings = NOWHERE, *, has_token: bool = False) -> None:
        self._surroundings = surroundings
        self._has_token = has_token
        self._listener: ProbeListener | None = None
        self._number = 0

    def perform(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order; returns the answer, which has `error` if that failed."""
        words = dict(order)
        orders: dict[str, Callable[..., dict[str, Any]]] = {
            "clock": self.clock,
            "look": self.look,
            "probe": self.probe,
        }
        try:
            answer = orders[words.pop("do")](**words)
        except (RallypointError, OSError) as error:
            return {"error": str(error)}
        return answer

    def serve(self, connection: socket.socket) -> None:
        """Carry out the orders that come from there, until it is closed at the other end."""
        with (
            contextlib.closing(self),
            connection,
            connection.makefile("rb") as lines,
            contextlib.suppress(OSError),
        ):
            for line in lines:
                send_line(connection, self.perform(json.loads(line)))

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def clock(self) -> dict[str, Any]:
        """The time on this node."""
        return {"time_s": time.time()}

    def look(self, *, order: dict[str, Any]) -> dict[str, Any]:
        """Facts about this node."""
        wanted = from_json(LookOrder, order)
        os.environ.update(wanted.environ)
        if wanted.port_range:
            os.environ[PORT_RANGE] = wanted.port_range
        self._number = wanted.number
        lost = _enter(wanted.directory)
        facts = look(_without_relative_paths(wanted) if lost else wanted, os.environ)
        facts = self._listen(facts, wanted.secret, wanted.endpoints)
        facts = replace(
            facts,
            paths=(*facts.paths, *lost),
            has_token=self._has_token or bool(os.environ.get(TOKEN)),
            jobs=_jobs(),
            surroundings=self._surroundings,
        )
        return {"facts": to_json(facts)}

    def probe(
        self, *, targets: list[dict[str, Any]], secret: str, endpoints: list[list[Any]]
    ) -> dict[str, Any]:
        """Measure how well this node reaches the others and the rendezvous endpoints."""
        others = [from_json(Target, each) for each in targets]
        pairs = [(str(host), int(port)) for host, port in endpoints]
        at_endpoints = probe_endpoints(self._number, pairs)
        probes = probe_all(self._number, others, bytes.fromhex(secret))
        return {"probes": to_json(probes), "endpoints": to_json(at_endpoints)}

    def _listen(
        self, facts: NodeFacts, secret: str, endpoints: Sequence[tuple[str, int]]
    ) -> NodeFacts:
        lookups = {each.host: each for each in facts.names}
        here = [each for each in endpoints if is_this_node(lookups[each[0]])]
        if not secret:  # no node will probe it
            return take_ports(facts, here, lambda port: listen(port).close())
        try:
            self._listener = ProbeListener(secret_of(bytes.fromhex(secret), self._number))
        except HostError as error:
            return replace(facts, probe_error=_of_range(str(error)))
        facts = replace(facts, probe_port=self._listener.port)
        return take_ports(facts, here, self._listener.listen_too)


def _of_range(text: str) -> str:
    """The error text, with the holder of the first port."""
    from rallypoint.store.port_holder import holder_of

    first = read_port_range(os.environ.get(PORT_RANGE, ""))[0]
    return f"{text.partition(';')[0]} ({first} by {holder_of(first)})"


def _enter(directory: str) -> tuple[PathLook, ...]:
    """Change to that directory, as a job would; a child process first tries whether it hangs."""
    if not directory:
        return ()
    found = look_at_path(directory)
    if found.state is PathState.HANGS:
        return (found,)
    try:
        os.chdir(directory)
    except OSError as error:
        why = error.strerror or ""
        return (PathLook(path=directory, state=PathState.MISSING, detail=why),)
    return ()


def _without_relative_paths(order: LookOrder) -> LookOrder:
    """What can be examined without the job's directory."""
    return replace(
        order,
        paths=tuple(filter(os.path.isabs, order.paths)),
        script=order.script if os.path.isabs(order.script) else "",
        log_dir=order.log_dir if os.path.isabs(order.log_dir) else "",
    )


def _jobs() -> tuple[str, ...]:
    return tuple(f"{agent.name} (process {agent.pid})" for agent in running_agents())


def main() -> int:
    """Carry out orders until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it stops when its input ends
    node = ExaminedNode()
    print(greeting(GREETING, {}), end="", flush=True)
    with contextlib.suppress(OSError):  # the reader may have gone
        for line in sys.stdin:
            print(json.dumps(node.perform(json.loads(line))), flush=True)
    node.close()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)  # a thread may hang in what it inspects


if __name__ == "__main__":
    main()
