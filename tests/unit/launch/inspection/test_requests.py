"""What comes through an agent's socket: requests, nonsense, and programs that never read."""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
from collections.abc import Iterator, Sequence

import pytest

from rallypoint.launch.inspection.requests import Answers, Conversations, Reply


class Fixed(Answers):
    """Answers the same to all."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.size = 10

    def status(self) -> dict[str, object]:
        return {"text": "x" * self.size}

    def records(self) -> Sequence[int]:
        return [1]

    def stop(self, why: str) -> None:
        self.stopped.append(why)

    def others(self, reply: Reply, *, trace_s: float = 0.0) -> None:
        reply({"nodes": []})


class Agent:
    """The part of an agent that answers."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.answers = Fixed()
        self.conversations = Conversations(self.selector, self.answers)

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
    assert answer(agent, b'{"ask": "status"}\n') == {"text": "x" * 10}
    assert answer(agent, b'{"ask": "stop", "why": "me"}\n') == {}
    assert agent.answers.stopped == ["me"]
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
    agent.answers.size = 5 << 20
    assert answer(agent, b'{"ask": "status"}\n') == {"text": "x" * (5 << 20)}


def test_nonsense_is_refused_and_harms_nobody(agent: Agent, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        line = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 50)))
        line = line.replace(b"\n", b"") + b"\n"
        assert "error" in answer(agent, line)
    assert "error" in answer(agent, b"[" * 50000 + b"\n")
    assert agent.answers.stopped == []


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
    agent.answers.size = 5 << 20
    slow = [agent.connect() for _ in range(40)]
    for program in slow:
        program.setblocking(False)
        try:
            program.send(b'{"ask": "status"}\n')
        except BrokenPipeError:
            continue
        agent.work()
    assert len(agent.selector.get_map()) <= 16
    agent.answers.size = 3
    assert answer(agent, b'{"ask": "status"}\n') == {"text": "xxx"}
    for program in slow:
        program.close()
