"""Inspects a whole job: this machine's nodes directly, others through their agents.

It takes at most four seconds. A node that has not answered by then is part of the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from rallypoint.base.errors import HostError
from rallypoint.base.json_records import from_json
from rallypoint.diagnosis.facts import Facts, Node
from rallypoint.launch.inspection.agent_client import Asking, NoAnswerError
from rallypoint.launch.inspection.agent_status import AgentStatus
from rallypoint.launch.inspection.entries import Found
from rallypoint.launch.inspection.look import BETWEEN_S, NodeLooks, look_twice

AT_MOST_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLooks:
    """Two looks at a job.

    Attributes:
        status: what an agent here reported of the job.
        notes: what could not be seen, and why, as sentences.
    """

    status: AgentStatus
    first: Facts
    second: Facts
    notes: tuple[str, ...]


def look_everywhere(agents: Sequence[Found], *, between_s: float = BETWEEN_S) -> JobLooks:
    """Inspect all nodes of the job of these agents, which run on this machine.

    Args:
        between_s: the time between the two looks at the nodes here.

    Raises:
        HostError: no agent answers.
    """
    until = time.monotonic() + AT_MOST_S
    seen = _Seen()
    with ThreadPoolExecutor(max_workers=min(32, len(agents) + 1)) as pool:
        here = [pool.submit(_look_here, agent, between_s) for agent in agents]
        others = pool.submit(_ask_for_others, agents, until)
        for look in here:
            seen.add_own(look.result())
        for line in others.result():
            seen.add_line(line)
    return seen.looks()


def _look_here(agent: Found, between_s: float) -> NodeLooks | HostError:
    try:
        with Asking.at(agent) as asking:
            return look_twice(asking, between_s)
    except HostError as error:
        return error


def _ask_for_others(agents: Sequence[Found], until: float) -> list[dict[str, object]]:
    """What the first agent that answers learned of the others."""
    for agent in agents:
        try:
            with Asking.at(agent) as asking:
                asking.send({"ask": "others"})
                return _lines(asking, until)
        except HostError:
            continue
    return []


def _lines(asking: Asking, until: float) -> list[dict[str, object]]:
    lines, expected, seen = [], -1, 0
    for line in asking.lines(until):
        lines.append(line)
        if "members" in line:
            expected = sum(not each.get("is_asking") for each in line["members"])
        elif line.get("ask") == "node":
            seen += 1
        if seen == expected:
            break
    return lines


class _Seen:
    """The answers so far."""

    def __init__(self) -> None:
        self._status: AgentStatus | None = None
        self._nodes: dict[int, tuple[Node, Node]] = {}
        self._expected: dict[str, Node] = {}  # by the keys of their agents
        self._coming: set[str] = set()
        self._errors: list[HostError] = []
        self._notes: list[str] = []

    def add_own(self, looks: NodeLooks | HostError) -> None:
        if isinstance(looks, HostError):
            self._errors.append(looks)
            return
        self._status = self._status or looks.status
        self._nodes[looks.second.node_rank] = (looks.first, looks.second)

    def add_line(self, line: dict[str, object]) -> None:
        try:
            if isinstance(members := line.get("members"), list):
                self._expected = {str(each["key"]): _silent_node(each) for each in members}
                if line.get("why"):
                    self._notes.append(f"other nodes were not asked: {line['why']}")
            elif line.get("ask") == "coming":
                self._coming.add(str(line["key"]))
            elif "trouble" in line:
                self._notes.append(f"a node could not be inspected: {line['trouble']}")
            else:
                first, second = from_json(Node, line["first"]), from_json(Node, line["second"])
                self._nodes.setdefault(second.node_rank, (first, second))
        except (HostError, KeyError, TypeError, ValueError) as error:
            self._notes.append(f"a node's answer is invalid ({error})")

    def looks(self) -> JobLooks:
        if self._status is None:
            raise self._errors[0] if self._errors else NoAnswerError("no agent", is_gone=True)
        for key, node in self._expected.items():
            if node.node_rank in self._nodes:
                continue
            missing = replace(node, silent_s=None) if key in self._coming else node
            self._nodes[node.node_rank] = (missing, missing)
            if key in self._coming:
                name = f"node {node.node_rank} ({node.host})"
                self._notes.append(f"{name} answers, but could not be inspected in time")
        pairs = [self._nodes[node_rank] for node_rank in sorted(self._nodes)]
        first, second = (
            Facts(
                run_id=self._status.run_id,
                round=self._status.round,
                world_size=self._status.world_size,
                nodes=tuple(pair[which] for pair in pairs),
            )
            for which in (0, 1)
        )
        return JobLooks(status=self._status, first=first, second=second, notes=tuple(self._notes))


def _silent_node(member: dict[str, object]) -> Node:
    """A node that has not answered, until it does."""
    ranks, silent_s = member["ranks"], member["silent_s"]
    if not isinstance(ranks, list) or not isinstance(silent_s, int | float):
        raise TypeError("a member without ranks")
    return Node(
        node_rank=int(str(member["node_rank"])),
        host=str(member["host"]),
        ranks=tuple(range(*ranks)),
        silent_s=max(AT_MOST_S, float(silent_s)),
    )
