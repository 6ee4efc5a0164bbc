"""Inspects on behalf of an agent, which starts it and reads its findings, one JSON object.

    node           this node, for another one
    trace SECONDS  the same, for that long: the calls that were made
    follow         reads this node once a second, until nobody follows the job (node_reader.py)
    job PID [S]    the whole job of that agent: the output of `rallypoint explain --json`; S seconds
                   between the two samples

For a node, and to follow, standard input is a connection to its agent, whose only thread must not
block for half a second.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence

from rallypoint.base.errors import HostError
from rallypoint.base.json_records import to_json
from rallypoint.launch.inspection.agent_client import AgentConnection
from rallypoint.launch.inspection.inspect_node import BETWEEN_S, sample_twice
from rallypoint.launch.inspection.node_trace import LATE_S, pack_trace
from rallypoint.launch.inspection.tracing import trace_node

_NODE_AT_MOST_S = 5  # after that its answer is not awaited
_JOB_AT_MOST_S = 15
_MOST_TRACE_S = 600.0


def main(words: Sequence[str]) -> None:
    """Inspect."""
    try:
        match words:
            case ["node"]:
                signal.alarm(_NODE_AT_MOST_S)
                seen = _node()
            case ["trace", seconds]:
                trace_s = min(float(seconds), _MOST_TRACE_S)
                signal.alarm(int(trace_s + LATE_S))
                seen = pack_trace(trace_node(_agent_here(), trace_s, lambda: False))
            case ["follow"]:
                from rallypoint.launch.inspection.node_reader import read_each_second

                read_each_second(_agent_here())
                os._exit(0)
            case ["job", pid, *between]:
                signal.alarm(_JOB_AT_MOST_S)
                seen = _job(int(pid), *map(float, between))
            case _:
                raise SystemExit(__doc__)
    except HostError as error:
        seen = {"trouble": str(error)}
    sys.stdout.write(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # a thread may hang in a file system


def _agent_here() -> AgentConnection:
    return AgentConnection(socket.socket(fileno=os.dup(0)), "this one")


def _node() -> dict[str, object]:
    samples = sample_twice(_agent_here())
    return {"first": to_json(samples.first), "second": to_json(samples.second)}


def _job(pid: int, between_s: float = BETWEEN_S) -> dict[str, object]:
    from rallypoint.diagnosis.answer import explanation_of
    from rallypoint.launch.inspection.all_nodes import look_everywhere
    from rallypoint.launch.inspection.entries import running_agents

    agents = running_agents()
    jobs = {agent.job for agent in agents if agent.pid == pid}
    samples = look_everywhere([agent for agent in agents if agent.job in jobs], between_s=between_s)
    found = explanation_of(samples.first, samples.second)
    return {"round": samples.second.round, **found.to_json()}


if __name__ == "__main__":
    main(sys.argv[1:])
