"""What comes through an agent's socket: requests, nonsense, and programs that never read; and what
comes from agents that have each other inspect their nodes.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from rallypoint.base.errors import ControlMessageError, HostError
from rallypoint.launch.agent.answers import read_message
from rallypoint.launch.inspection.agent_client import read_status
from rallypoint.launch.inspection.requests import (
    AgentStatus,
    Answers,
    AskNode,
    AskOthers,
    Conversations,
    Finding,
    Inquiry,
    Line,
    LineFor,
    RankStatus,
    Relay,
    Reply,
    Tell,
)
from rallypoint.launch.rounds.source import AgentInfo, Roster, RoundSource
from rallypoint.rendezvous.job.reports import NodeReport
from rallypoint.rendezvous.transport.codec import encode

STATUS = AgentStatus(
    run_id="try",
    host="h",
    pid=7,
    node_rank=0,
    phase="running",
    round=0,
    nodes=1,
    world_size=2,
    uptime_s=1.5,
    oom_kills=None,
    loopback_trouble="",
    news="",
    workers=(
        RankStatus(rank=0, local_rank=0, record_slot=0, has_ended=False, pid=8),
        RankStatus(
            rank=1, local_rank=1, record_slot=3, has_ended=True, signal="SIGKILL", ended_at=2.5
        ),
    ),
)


class Agent:
    """The part of an agent that answers."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.stopped: list[str] = []
        self.following: list[Tell] = []
        self.size = 10
        answers = Answers(
            status=lambda: STATUS.__replace__(news="x" * self.size),
            records=lambda: [1],
            stop=self.stopped.append,
            others=lambda reply, _: reply(Line(nodes=())),
            follow=self.following.append,
            follow_node=self.following.append,
        )
        self.conversations = Conversations(self.selector, answers)

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self.conversations.begin(theirs)
        return ours

    def work(self) -> None:
        """Until there is nothing to do."""
        while self.selector.get_map() and (ready := self.selector.select(0)):
            for key, _ in ready:
                key.data()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.conversations.close()
    agent.selector.close()


def answer(agent: Agent, request: bytes) -> dict[str, object]:
    with agent.connect() as program:
        program.sendall(request)
        data = b""
        program.setblocking(False)
        while not data.endswith(b"\n"):
            agent.work()
            try:
                part = program.recv(1 << 20)
            except BlockingIOError:
                continue
            assert part, data
            data += part
        assert program.recv(1) == b""  # and no more
    told = json.loads(data)
    assert isinstance(told, dict)
    return told


def test_requests_are_answered_once(agent: Agent) -> None:
    told = answer(agent, b'{"ask": "status"}\n')
    assert read_status(told) == STATUS.__replace__(news="x" * 10)
    assert answer(agent, b'{"ask": "stop", "why": "me"}\n') == {}
    assert agent.stopped == ["me"]
    assert "does not know" in str(answer(agent, b'{"ask": "dance"}\n')["error"])


def test_descriptors_come_with_a_look(agent: Agent) -> None:
    with agent.connect() as program:
        program.sendall(b'{"ask": "look"}\n')
        agent.work()
        _, descriptors, _, _ = socket.recv_fds(program, 1 << 16, 4)
    (descriptor,) = descriptors
    assert os.fstat(descriptor).st_ino == os.fstat(1).st_ino
    os.close(descriptor)


def test_long_answers_wait_for_their_readers(agent: Agent) -> None:
    agent.size = 5 << 20
    assert answer(agent, b'{"ask": "status"}\n')["news"] == "x" * (5 << 20)


def test_nonsense_is_refused_and_harms_nobody(agent: Agent, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        line = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 50)))
        line = line.replace(b"\n", b"") + b"\n"
        assert "error" in answer(agent, line)
    assert "error" in answer(agent, b"[" * 50000 + b"\n")
    assert agent.stopped == []


def test_who_sends_too_much_is_cut_off(agent: Agent) -> None:
    with agent.connect() as program:
        program.setblocking(False)
        sent = 0
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while sent < 10 << 20:
                sent += program.send(b"x" * 10000)
                agent.work()
    assert not agent.selector.get_map()


def test_those_who_never_read_make_room_for_others(agent: Agent) -> None:
    agent.size = 5 << 20
    slow = [agent.connect() for _ in range(40)]
    for program in slow:
        program.setblocking(False)
        try:
            program.send(b'{"ask": "status"}\n')
        except BrokenPipeError:
            continue
        agent.work()
    assert len(agent.selector.get_map()) <= 16
    agent.size = 3
    assert answer(agent, b'{"ask": "status"}\n')["news"] == "xxx"
    for program in slow:
        program.close()


@pytest.mark.parametrize("request_", [b'{"ask": "follow"}\n', b'{"ask": "follow node"}\n'])
def test_those_who_follow_stay_whoever_else_asks(agent: Agent, request_: bytes) -> None:
    with agent.connect() as program:
        program.sendall(request_)
        agent.work()
        for _ in range(40):
            with agent.connect() as other:
                other.sendall(b'{"ask": "sta')
                agent.work()
                assert answer(agent, b'{"ask": "status"}\n')["run_id"] == "try"
        (tell,) = agent.following
        assert tell("a line")
        assert program.recv(100) == b"a line\n"
        # Asked again twice before the agent could read.
        program.sendall(2 * request_)
        agent.work()
        assert agent.following == [tell, tell]
    agent.work()
    assert not tell("nobody listens")


def test_lines_are_left_out_for_those_who_are_behind(agent: Agent) -> None:
    with agent.connect() as program:
        program.sendall(b'{"ask": "follow"}\n')
        agent.work()
        (tell,) = agent.following
        lines = [f"{number:06} {'x' * 1000}" for number in range(2000)]
        assert all(tell(line) for line in lines)  # 2 MB: nothing is kept but the last one
        program.setblocking(False)
        data, before = b"", -1
        while len(data) > before:
            before = len(data)
            agent.work()
            with suppress(BlockingIOError):
                while True:
                    data += program.recv(1 << 20)
        *got, rest = data.decode().split("\n")
        assert not rest
        assert 10 < len(got) < 1000
        assert got == lines[: len(got)]  # each of them whole
        assert tell("now")
        assert program.recv(100) == b"now\n"


@pytest.mark.parametrize("wrong", [{}, {"workers": 1}, {"workers": [{"rank": 0}]}, {"pid": "7"}])
def test_what_is_not_a_status_is_refused(agent: Agent, wrong: dict[str, object]) -> None:
    told = answer(agent, b'{"ask": "status"}\n')
    assert [each.rank for each in read_status(told).running] == [0]
    with pytest.raises(HostError, match="may run another version"):
        read_status({**told, **wrong} if wrong else {})


class Agents:
    """Some agents, the first of which coordinates; what one says to another comes at once."""

    def __init__(self, count: int, *, stopped: tuple[int, ...] = ()) -> None:
        members = tuple(AgentInfo(f"key{i}", i, f"host{i}", 2, 0.0) for i in range(count))
        self.stopped = stopped
        self.rounds = [Connected(self, i, members) for i in range(count)]
        self.relays = [Relay(rounds, self._look(i)) for i, rounds in enumerate(self.rounds)]

    def _look(self, number: int) -> Callable[[Finding, float], None]:
        def look(tell: Finding, trace_s: float) -> None:
            tell({"trace": f"{number} for {trace_s:g} s"} if trace_s else {"node": number})

        return look

    def ask(self, number: int, **how: float) -> list[Line]:
        told: list[Line] = []
        reply: Reply = told.append
        self.relays[number].ask(reply, **how)
        return told

    def heard(self, number: int, sender: str, payload: bytes) -> None:
        message = read_message(payload)
        assert isinstance(message, Inquiry)
        self.relays[number].heard(sender, message)


class Connected(RoundSource):
    """An agent's connections to the others."""

    def __init__(self, agents: Agents, number: int, members: tuple[AgentInfo, ...]) -> None:
        super().__init__(f"key{number}")
        self._agents, self._members = agents, members

    def roster(self) -> Roster:
        leads = self.key == "key0"
        return Roster(me=self.key, leader="key0", members=self._members if leads else ())

    def inquire(self, key: str, payload: bytes) -> None:
        for number, rounds in enumerate(self._agents.rounds):
            if rounds.key == key and number not in self._agents.stopped:
                self._agents.heard(number, self.key, payload)

    def open(self, selector: selectors.BaseSelector) -> None: ...

    def tell(self, report: NodeReport) -> None: ...

    def tick(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


def test_each_agent_gets_all_others() -> None:
    agents = Agents(4)
    for asking in range(4):
        expected, *rest = agents.ask(asking)
        nodes = expected.nodes or ()
        assert [each.is_asking for each in nodes] == [i == asking for i in range(4)]
        assert [each.ranks for each in nodes] == [(0, 2), (2, 4), (4, 6), (6, 8)]
        others = [i for i in range(4) if i != asking]
        assert sorted(each.coming for each in rest if each.coming) == [f"key{i}" for i in others]
        assert sorted(str(each.found["node"]) for each in rest if each.found) == [
            f"{i}" for i in others
        ]


def test_each_agent_traces_for_as_long_as_it_is_asked_to() -> None:
    for asking in range(3):
        _, *rest = Agents(3).ask(asking, trace_s=2.5)
        traces = sorted(str(each.found["trace"]) for each in rest if each.found)
        assert traces == [f"{i} for 2.5 s" for i in range(3) if i != asking]


def test_one_that_is_stopped_is_missing() -> None:
    _, *rest = Agents(3, stopped=(2,)).ask(1)
    assert {each.coming for each in rest if each.coming} == {"key0"}


def test_without_a_coordinator_nobody_is_asked() -> None:
    assert Agents(3, stopped=(0,)).ask(2) == []


def test_nonsense_is_left_out(seed: int) -> None:
    chance = random.Random(seed)
    agents = Agents(3)
    keys = ["key0", "key1", "key2", "key9", ""]
    for _ in range(2000):
        number, asker, trace_s = chance.randrange(3), chance.choice(keys), chance.choice([0.0, 1.0])
        message = chance.choice(
            [
                AskOthers(number=number, trace_s=trace_s),
                AskNode(number=number, asker=asker, trace_s=trace_s),
                LineFor(number=number, asker=asker, line=Line(coming=asker)),
                LineFor(number=number, asker=asker, line=Line(found={"any": [None]})),
            ]
        )
        data = encode(message)
        if chance.random() < 0.2:
            data = data[: chance.randrange(len(data))]
            with pytest.raises(ControlMessageError):
                read_message(data)
        else:
            agents.heard(chance.randrange(3), f"key{chance.randrange(3)}", data)
    assert len(agents.ask(1)) == 5
