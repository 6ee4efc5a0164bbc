"""Inspects or traces a whole job: this machine's nodes directly, others through their agents.

An inspection takes at most four seconds, a trace up to fifteen more than the time that is traced. A
node that has not answered by then is part of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from rallypoint.base.errors import ControlMessageError, HostError
from rallypoint.base.json_records import from_json
from rallypoint.diagnosis.facts import Facts, Node
from rallypoint.launch.inspection.agent_client import AgentConnection, NoAnswerError, ask_status
from rallypoint.launch.inspection.entries import Found
from rallypoint.launch.inspection.inspect_node import BETWEEN_S, NodeSamples, sample_twice
from rallypoint.launch.inspection.node_trace import LATE_S, JobTrace, NodeTrace, unpack_trace
from rallypoint.launch.inspection.requests import AgentStatus, ExpectedNode, Line
from rallypoint.launch.inspection.tracing import trace_node

_AT_MOST_S = 4.0
_MOMENT_S = 0.1
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSamples:
    """Two samples of a job.

    Attributes:
        status: what an agent here reported of the job.
        notes: what could not be seen, and why, as sentences.
    """

    status: AgentStatus
    first: Facts
    second: Facts
    notes: tuple[str, ...]


def look_everywhere(agents: Sequence[Found], *, between_s: float = BETWEEN_S) -> JobSamples:
    """Inspect all nodes of the job of these agents, which run on this machine.

    Args:
        between_s: the time between the two samples at the nodes here.
    """
    others = _OtherNodes("inspected", _read_samples)
    until = time.monotonic() + _AT_MOST_S
    own = _everywhere(
        agents,
        lambda connection: sample_twice(connection, between_s),
        lambda: others.ask(agents, {"ask": "others"}, silent_at=until, until=until),
    )
    here = [each for each in own if isinstance(each, NodeSamples)]
    if not here:
        errors = [each for each in own if isinstance(each, HostError)]
        raise errors[0] if errors else NoAnswerError("no agent", is_gone=True)
    nodes = others.found | {each.second.node_rank: (each.first, each.second) for each in here}
    notes = [*others.notes, *others.troubles]
    for node in others.expected or ():
        if node.node_rank in nodes or node.node_rank < 0:  # before the first round
            continue
        missing = Node(
            node_rank=node.node_rank,
            host=node.host,
            ranks=tuple(range(*node.ranks)),
            silent_s=None if node.key in others.coming else max(_AT_MOST_S, node.silent_s),
        )
        nodes[node.node_rank] = missing, missing
        if node.key in others.coming:
            name = f"node {node.node_rank} ({node.host})"
            notes.append(f"{name} answers, but could not be inspected in time")
    status = here[0].status
    first, second = (
        Facts(
            run_id=status.run_id,
            round=status.round,
            world_size=status.world_size,
            nodes=tuple(nodes[node_rank][which] for node_rank in sorted(nodes)),
        )
        for which in (0, 1)
    )
    return JobSamples(status=status, first=first, second=second, notes=tuple(notes))


def trace_everywhere(
    agents: Sequence[Found], seconds: float, is_over: Callable[[], bool]
) -> JobTrace:
    """The calls of the job of these agents, which run on this machine.

    Other nodes trace for the whole time: if `is_over` comes earlier, their traces are not awaited.
    """
    others = _OtherNodes("traced", _read_trace)
    status = ask_status(agents[0])
    end = time.monotonic() + seconds
    own = _everywhere(
        agents,
        lambda connection: trace_node(connection, seconds, is_over),
        lambda: others.ask(
            agents,
            {"ask": "others traced", "seconds": seconds},
            silent_at=end + _AT_MOST_S,
            until=end + LATE_S,
            is_over=is_over,
        ),
    )
    errors = [each for each in own if isinstance(each, HostError)]
    if len(errors) == len(own):
        raise errors[0]
    traces = others.found | {each.node_rank: each for each in own if isinstance(each, NodeTrace)}
    nodes = tuple(traces[node_rank] for node_rank in sorted(traces))
    notes = list(others.notes)
    # An agent on this machine is asked by the other agents as well, and traces once at a time.
    missing = others.missing(traces)
    if missing is None or missing:
        notes += [*others.troubles, *others.unasked, *map(str, errors)]
        why = "you stopped the trace before it answered" if is_over() else "it has not answered"
        for node in missing or ():
            notes.append(f"node {node.node_rank} ({node.host}) is missing: {why}")
    notes += [note for trace in nodes for note in trace.notes]
    return JobTrace(run_id=status.run_id, round=status.round, nodes=nodes, notes=tuple(notes))


def _everywhere(
    agents: Sequence[Found], inspect: Callable[[AgentConnection], R], ask_others: Callable[[], None]
) -> list[R | HostError]:
    """The findings of each agent here; meanwhile, the others are asked."""

    def inspect_here(agent: Found) -> R | HostError:
        try:
            with AgentConnection.at(agent) as connection:
                return inspect(connection)
        except HostError as error:
            return error

    with ThreadPoolExecutor(max_workers=min(32, len(agents) + 1)) as pool:
        asked = pool.submit(ask_others)
        own = list(pool.map(inspect_here, agents))
        asked.result()
    return own


class _OtherNodes(Generic[R]):
    """What the agents of other nodes have answered so far.

    Args:
        done: what they do, in a word.
        read: reads their findings: a node's rank, and what was found there.

    Attributes:
        expected: all nodes of the job; None: not known yet.
        coming: keys of the agents that are about to inspect their nodes.
        found: by node rank.
        notes: what could not be seen, as sentences.
        troubles: nodes that answered, but without findings; `unasked`: why no node could be asked.
    """

    def __init__(self, done: str, read: Callable[[Mapping[str, object]], tuple[int, R]]) -> None:
        self.expected: tuple[ExpectedNode, ...] | None = None
        self.coming: set[str] = set()
        self.found: dict[int, R] = {}
        self.notes: list[str] = []
        self.troubles: list[str] = []
        self.unasked: list[str] = []
        self._done, self._read = done, read

    def ask(
        self,
        agents: Sequence[Found],
        request: dict[str, object],
        *,
        silent_at: float,
        until: float,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Ask the first agent that answers, and listen until all have answered, or `until`.

        Args:
            silent_at: until when those are waited for that have not even confirmed.
        """

        def is_done() -> bool:
            now, missing = time.monotonic(), self.missing(self.found)
            if now > silent_at and missing is not None:
                missing = [each for each in missing if each.key in self.coming]
            is_complete = missing is not None and len(missing) <= len(self.troubles)
            return is_complete or now > until or is_over()

        for agent in agents:
            try:
                with AgentConnection.at(agent) as connection:
                    connection.send(request)
                    while not connection.has_ended and not is_done():
                        for line in connection.lines(min(until, time.monotonic() + _MOMENT_S)):
                            self.add(line)
                            if is_done():
                                break
                    return
            except HostError as error:
                self.unasked.append(f"other nodes were not asked: {error}")

    def add(self, answer: dict[str, object]) -> None:
        """An agent has answered."""
        try:
            line = from_json(Line, answer)
            if line.nodes is not None:
                self.expected = line.nodes
                if line.why:
                    self.notes.append(f"other nodes were not asked: {line.why}")
            elif line.coming:
                self.coming.add(line.coming)
            elif "trouble" in (found := line.found or {}):
                self.troubles.append(f"a node could not be {self._done}: {found['trouble']}")
            else:
                node_rank, read = self._read(found)
                self.found[node_rank] = read
        except ControlMessageError as error:
            self.troubles.append(f"a node's answer is invalid ({error})")

    def missing(self, found: Mapping[int, object]) -> list[ExpectedNode] | None:
        """The nodes that have not answered; None: the nodes are not known."""
        if self.expected is None:
            return None
        return [
            each for each in self.expected if not each.is_asking and each.node_rank not in found
        ]


def _read_samples(found: Mapping[str, object]) -> tuple[int, tuple[Node, Node]]:
    first = from_json(Node, found.get("first"))
    second = from_json(Node, found.get("second"))
    return second.node_rank, (first, second)


def _read_trace(found: Mapping[str, object]) -> tuple[int, NodeTrace]:
    trace = unpack_trace(found)
    return trace.node_rank, trace
