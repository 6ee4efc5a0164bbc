"""Looks at this node for another one: the agent starts it, and gets what it has seen.

    python -m rallypoint.launch.inspection [--trace SECONDS]

Its standard input is a connection to the agent, its standard output takes what it has seen. The
agent has one thread, which must not wait for half a second.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from rallypoint.base.errors import HostError
from rallypoint.launch.inspection.client import Asking
from rallypoint.launch.inspection.facts_json import encode
from rallypoint.launch.inspection.look import look_twice
from rallypoint.launch.inspection.tracing.collect import trace_node
from rallypoint.launch.inspection.tracing.packing import LATE_S, pack

_AT_MOST_S = 5  # then nobody waits for it any more
_MOST_TRACE_S = 600.0


def main() -> None:
    """Look, or trace."""
    trace_s = min(float(sys.argv[2]), _MOST_TRACE_S) if sys.argv[1:2] == ["--trace"] else 0.0
    signal.alarm(_AT_MOST_S if not trace_s else int(trace_s + LATE_S))
    agent = Asking(socket.socket(fileno=os.dup(0)), "the one here")
    try:
        seen = _look(agent) if not trace_s else pack(trace_node(agent, trace_s, lambda: False))
    except HostError as error:
        seen = {"trouble": str(error)}
    sys.stdout.write(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # a thread may hang in a file system


def _look(agent: Asking) -> dict[str, object]:
    looks = look_twice(agent)
    return {"first": encode(looks.first), "second": encode(looks.second)}


if __name__ == "__main__":
    main()
