"""Traces a whole job: this machine's nodes directly, others through their agents."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from rallypoint.base.errors import HostError
from rallypoint.launch.inspection.agent_client import Asking
from rallypoint.launch.inspection.agent_status import ask_status
from rallypoint.launch.inspection.entries import Found
from rallypoint.launch.inspection.look_everywhere import AT_MOST_S
from rallypoint.launch.inspection.tracing.call_packing import LATE_S, unpack
from rallypoint.launch.inspection.tracing.collect import trace_node
from rallypoint.launch.inspection.tracing.node_trace import JobTrace, NodeTrace

_MOMENT_S = 0.1


def trace_everywhere(
    agents: Sequence[Found], seconds: float, is_over: Callable[[], bool]
) -> JobTrace:
    """The calls of the job of these agents, which run on this machine.

    Other nodes trace for the whole time: if `is_over` comes earlier, their traces are not awaited.

    Raises:
        HostError: no agent here answers, or the job is being traced already.
    """
    status = ask_status(agents[0])
    with ThreadPoolExecutor(max_workers=min(32, len(agents) + 1)) as pool:
        others = pool.submit(_trace_others, agents, seconds, is_over)
        here = [pool.submit(_trace_here, agent, seconds, is_over) for agent in agents]
        own = [trace.result() for trace in here]
        seen = others.result()
    errors = [error for error in own if isinstance(error, HostError)]
    if len(errors) == len(own):
        raise errors[0]
    seen.add_own([trace for trace in own if isinstance(trace, NodeTrace)], errors)
    nodes = tuple(seen.nodes[node_rank] for node_rank in sorted(seen.nodes))
    notes = seen.said(was_interrupted=is_over()) + [note for node in nodes for note in node.notes]
    return JobTrace(run_id=status.run_id, round=status.round, nodes=nodes, notes=tuple(notes))


def _trace_here(agent: Found, seconds: float, is_over: Callable[[], bool]) -> NodeTrace | HostError:
    try:
        with Asking.at(agent) as asking:
            return trace_node(asking, seconds, is_over)
    except HostError as error:
        return error


def _trace_others(agents: Sequence[Found], seconds: float, is_over: Callable[[], bool]) -> _Seen:
    """What the first agent that answers learned of the others."""
    seen = _Seen()
    for agent in agents:
        try:
            with Asking.at(agent) as asking:
                asking.send({"ask": "others traced", "seconds": seconds})
                seen.read(asking, seconds, is_over)
                break
        except HostError as error:
            seen.troubles.append(f"other nodes were not asked: {error}")
    return seen


class _Seen:
    """The answers so far.

    Attributes:
        nodes: by node rank.
        troubles: what went wrong; ignored if all nodes have answered in the end. (An agent on this
            machine is asked by the other agents as well, and traces once at a time.)
    """

    def __init__(self) -> None:
        self.nodes: dict[int, NodeTrace] = {}
        self.troubles: list[str] = []
        self._notes: list[str] = []
        self._expected: dict[str, tuple[int, str]] | None = None  # by key: node rank and host
        self._coming: set[str] = set()

    def add_own(self, traces: Sequence[NodeTrace], errors: Sequence[HostError]) -> None:
        """The trace of this machine."""
        self.nodes |= {trace.node_rank: trace for trace in traces}
        self.troubles += map(str, errors)

    def read(self, asking: Asking, seconds: float, is_over: Callable[[], bool]) -> None:
        """Listen until all have answered; less long for those that have not even confirmed."""
        silent_at = time.monotonic() + seconds + AT_MOST_S
        until = time.monotonic() + seconds + LATE_S
        while not asking.has_ended and not is_over():
            now = time.monotonic()
            for line in asking.lines(now + _MOMENT_S):
                self._add(line)
            missing = self._missing()
            if now > silent_at and missing is not None:
                missing = [key for key in missing if key in self._coming]
            if now > until or (missing is not None and len(missing) <= len(self.troubles)):
                return

    def said(self, *, was_interrupted: bool) -> list[str]:
        """Notes, also on nodes that are missing."""
        why = (
            "you stopped the trace before it answered" if was_interrupted else "it has not answered"
        )
        expected, missing = self._expected or {}, self._missing()
        if missing == []:
            return self._notes
        return [
            *self._notes,
            *self.troubles,
            *(
                f"node {expected[key][0]} ({expected[key][1]}) is missing: {why}"
                for key in missing or ()
            ),
        ]

    def _missing(self) -> list[str] | None:
        """Keys of nodes that have not answered; None: the nodes are not known."""
        if self._expected is None:
            return None
        return [key for key, (rank, _) in self._expected.items() if rank not in self.nodes]

    def _add(self, line: dict[str, object]) -> None:
        try:
            if isinstance(members := line.get("members"), list):
                self._expected = {
                    str(each["key"]): (int(each["node_rank"]), str(each["host"]))
                    for each in members
                    if not each.get("is_asking")
                }
                if line.get("why"):
                    self._notes.append(f"other nodes were not asked: {line['why']}")
            elif line.get("ask") == "coming":
                self._coming.add(str(line["key"]))
            elif "trace" in line:
                trace = unpack(line)
                self.nodes[trace.node_rank] = trace
            else:
                why = line.get("trouble", "it runs an older version of rallypoint")
                self.troubles.append(f"a node could not be traced: {why}")
        except (HostError, KeyError, TypeError, ValueError) as error:
            self.troubles.append(f"a node's answer is invalid ({error})")
