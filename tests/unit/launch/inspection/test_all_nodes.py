"""A whole job, from what its agents answer: other nodes, those that are late, and nonsense."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from rallypoint.base.errors import HostError
from rallypoint.base.json_records import to_json
from rallypoint.diagnosis.facts import Node
from rallypoint.launch.inspection import all_nodes
from rallypoint.launch.inspection.agent_client import NoAnswerError
from rallypoint.launch.inspection.all_nodes import JobSamples, look_everywhere, trace_everywhere
from rallypoint.launch.inspection.inspect_node import NodeSamples
from rallypoint.launch.inspection.node_trace import JobTrace, NodeTrace, pack_trace
from rallypoint.launch.inspection.requests import AgentStatus, ExpectedNode, Line

STATUS = AgentStatus(
    run_id="try",
    host="h0",
    pid=7,
    node_rank=0,
    phase="running",
    round=3,
    nodes=3,
    world_size=6,
    uptime_s=1.5,
    oom_kills=None,
    loopback_trouble="",
    news="",
    workers=(),
)
EXPECTED = Line(
    nodes=tuple(
        ExpectedNode(
            key=f"key{number}",
            node_rank=number,
            host=f"h{number}",
            silent_s=0.5,
            ranks=(2 * number, 2 * number + 2),
            is_asking=number == 0,
        )
        for number in range(3)
    )
)
AGENTS: list[Any] = ["an agent"]


def node(number: int) -> Node:
    return Node(node_rank=number, host=f"h{number}", ranks=(2 * number, 2 * number + 1))


def trace(number: int) -> NodeTrace:
    return NodeTrace(
        node_rank=number,
        host=f"h{number}",
        clock="",
        wall_ns=None,
        began_ns=0,
        ended_ns=1,
        workers=(),
    )


def looks_of(number: int) -> Line:
    told = to_json(node(number))
    return Line(found={"first": told, "second": told})


class Clock:
    """The time, which passes only while answers are waited for."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class FakeConnection:
    """A connection to an agent."""

    clock = Clock()
    answers: ClassVar[list[Any]] = []
    refuses = False

    def __init__(self) -> None:
        self.has_ended = False
        self._unread = [to_json(each) if isinstance(each, Line) else each for each in self.answers]

    @classmethod
    def at(cls, agent: object) -> FakeConnection:
        if cls.refuses:
            raise NoAnswerError("it is stopped.", is_gone=False)
        return cls()

    def __enter__(self) -> FakeConnection:
        return self

    def __exit__(self, *_: object) -> None: ...

    def send(self, request: dict[str, object]) -> None: ...

    def lines(self, until: float) -> Iterator[Any]:
        while self._unread:
            yield self._unread.pop(0)
        self.clock.now = until + 0.001


@pytest.fixture(autouse=True)
def connection(monkeypatch: pytest.MonkeyPatch) -> type[FakeConnection]:
    class AgentConnection(FakeConnection):
        clock = Clock()
        answers: ClassVar[list[Any]] = []

    monkeypatch.setattr(all_nodes, "AgentConnection", AgentConnection)
    monkeypatch.setattr(all_nodes, "time", AgentConnection.clock)
    monkeypatch.setattr(all_nodes, "ask_status", lambda agent: STATUS)
    looks = NodeSamples(status=STATUS, first=node(0), second=node(0))
    monkeypatch.setattr(all_nodes, "sample_twice", lambda connection, between_s: looks)
    monkeypatch.setattr(all_nodes, "trace_node", lambda connection, seconds, is_over: trace(0))
    return AgentConnection


def look(connection: type[FakeConnection], *answers: object) -> JobSamples:
    connection.answers = list(answers)
    return look_everywhere(AGENTS)


def trace_all(
    connection: type[FakeConnection], *answers: object, over_at: float = 99.0
) -> JobTrace:
    connection.answers = list(answers)
    return trace_everywhere(AGENTS, 5.0, lambda: connection.clock.now >= over_at)


def test_all_nodes_are_seen(connection: type[FakeConnection]) -> None:
    looks = look(connection, EXPECTED, Line(coming="key2"), looks_of(2), looks_of(1))
    assert looks.second.nodes == looks.first.nodes == (node(0), node(1), node(2))
    assert (looks.second.run_id, looks.second.round, looks.second.world_size) == ("try", 3, 6)
    assert (looks.status, looks.notes, connection.clock.now) == (STATUS, (), 0.0)


def test_nodes_that_do_not_answer_are_waited_for(connection: type[FakeConnection]) -> None:
    looks = look(connection, EXPECTED, Line(coming="key2"))
    assert connection.clock.now == pytest.approx(4.0, abs=0.1)
    _, silent, late = looks.second.nodes
    assert (silent.host, silent.ranks, silent.silent_s) == ("h1", (2, 3), 4.0)
    assert (late.host, late.ranks, late.silent_s) == ("h2", (4, 5), None)
    assert looks.notes == ("node 2 (h2) answers, but could not be inspected in time",)


def test_before_the_first_round_nobody_is_missing(connection: type[FakeConnection]) -> None:
    assert EXPECTED.nodes is not None
    waiting = tuple(each.__replace__(node_rank=-1, ranks=(0, 0)) for each in EXPECTED.nodes)
    looks = look(connection, Line(nodes=waiting[:1]), Line(nodes=waiting))
    assert looks.second.nodes == (node(0),)


def test_answers_without_findings_are_noted(connection: type[FakeConnection]) -> None:
    nonsense = {"found": {"first": 7, "second": to_json(node(1))}}
    looks = look(connection, EXPECTED, Line(found={"trouble": "no room"}), nonsense)
    assert connection.clock.now == 0.0  # nobody else is to be waited for
    assert looks.notes == (
        "a node could not be inspected: no room",
        "a node's answer is invalid (these facts are invalid: 7 is not a Node)",
    )
    looks = look(connection, Line(nodes=(), why="nobody coordinates"), {"unknown": 1})
    assert looks.notes == ("other nodes were not asked: nobody coordinates",)


def test_an_agent_that_does_not_answer(connection: type[FakeConnection]) -> None:
    connection.refuses = True
    with pytest.raises(NoAnswerError, match="it is stopped"):
        look(connection)
    with pytest.raises(HostError, match="it is stopped"):
        trace_all(connection)


def test_all_nodes_are_traced(connection: type[FakeConnection]) -> None:
    told = [Line(found=pack_trace(trace(number))) for number in (2, 1)]
    found = trace_all(connection, EXPECTED, *told)
    assert found == JobTrace(run_id="try", round=3, nodes=(trace(0), trace(1), trace(2)))


def test_nodes_that_are_not_traced_are_noted(connection: type[FakeConnection]) -> None:
    trouble = Line(found={"trouble": "it is traced already"})
    found = trace_all(connection, EXPECTED, Line(coming="key2"), trouble)
    assert connection.clock.now == pytest.approx(5.0 + 4.0, abs=0.2)  # one node has not confirmed
    assert found.notes == (
        "a node could not be traced: it is traced already",
        "node 1 (h1) is missing: it has not answered",
        "node 2 (h2) is missing: it has not answered",
    )
    found = trace_all(connection, EXPECTED, over_at=connection.clock.now + 1.0)
    assert found.notes[0] == "node 1 (h1) is missing: you stopped the trace before it answered"
