"""What agents tell each other of workers arrives as it was sent, nonsense is ignored, and only the
agent that coordinates has ranks ended.
"""

from __future__ import annotations

import json
import random
import selectors
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest

from rallypoint.base.errors import ControlMessageError
from rallypoint.launch.agent.answers import AgentAnswers, read_message
from rallypoint.launch.agent.complaints import (
    AgentMessage,
    ContactLost,
    EndRank,
    LongWaits,
    TimedOut,
)
from rallypoint.launch.agent.local_workers import AgentParts
from rallypoint.launch.agent.node import EndElsewhere
from rallypoint.launch.agent.stuck_ranks import StuckRanks
from rallypoint.launch.rounds.source import AgentInfo, Roster
from rallypoint.rendezvous.transport.codec import VERSION, encode

MESSAGES: list[AgentMessage] = [
    LongWaits(2, 5, 31.5, is_over=False),
    LongWaits(2, 4, 3.0, is_over=True, is_stopped=True),
    TimedOut(2, 5, 1, (1, 5)),
    TimedOut(2, 5, 1),
    ContactLost(2, 5, -1, had_formed=False),
    ContactLost(2, 5, -1, had_formed=True),
    EndRank(2, 1, "it is late"),
]


class Agent:
    """One of three agents, the first of which coordinates; what it says comes at once."""

    def __init__(self, number: int, agents: list[Agent]) -> None:
        self.told: list[AgentMessage] = []
        self.key, self._agents = f"key{number}", agents
        self.selector = selectors.DefaultSelector()
        unused: Any = None
        parts = AgentParts(
            job=unused,
            selector=self.selector,
            rounds=cast(Any, self),
            state=unused,
            workers=unused,
            progress=unused,
            perform=unused,
            inspect=unused,
            read_workers=unused,
        )
        self.stuck_ranks = StuckRanks(parts)
        self.answers = AgentAnswers(
            parts, unused, began=0.0, stop=unused, reported=self.told.append
        )

    def roster(self) -> Roster:
        members = tuple(AgentInfo(f"key{i}", i, "h", 2, 0.0) for i in range(3))
        return Roster(me=self.key, leader="key0", members=members if self.key == "key0" else ())

    def inquire(self, key: str, payload: bytes) -> None:
        self._agents[int(key[-1])].answers.heard(self.key, payload)


@pytest.fixture
def agents() -> Iterator[list[Agent]]:
    agents: list[Agent] = []
    agents += [Agent(number, agents) for number in range(3)]
    yield agents
    for agent in agents:
        agent.answers.close()
        agent.selector.close()


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_messages_arrive_as_they_were_sent(message: AgentMessage, agents: list[Agent]) -> None:
    assert read_message(encode(message)) == message
    agents[0].inquire("key1", encode(message))
    assert agents[1].told == [message]


def test_only_who_coordinates_has_ranks_ended(agents: list[Agent]) -> None:
    order = EndRank(2, 1, "it is late")
    agents[0].stuck_ranks.end_elsewhere(EndElsewhere(1, 2, order.because))
    assert [agent.told for agent in agents] == [[], [order], [order]]
    agents[1].stuck_ranks.end_elsewhere(EndElsewhere(1, 2, order.because))
    agents[2].inquire("key1", encode(order))
    assert [agent.told for agent in agents] == [[], [order], [order]]


def test_nonsense_is_ignored(agents: list[Agent], seed: int) -> None:
    chance = random.Random(seed)
    words: list[object] = ["LongWaits", "TimedOut", "ContactLost", "EndRank", "LineFor", "key1"]
    words += [None, True, 7, -1, 2.5, [], [1], {}]
    heard = 0
    for _ in range(3000):
        fields = [chance.choice(words) for _ in range(chance.randrange(7))]
        data = json.dumps([VERSION, *fields]).encode()
        if chance.random() < 0.2:
            data = data[: chance.randrange(len(data))]
        with suppress(ControlMessageError):
            message = read_message(data)
            heard += isinstance(message, AgentMessage) and not isinstance(message, EndRank)
        agents[1].inquire("key0", data)
    assert len(agents[0].told) == heard


def test_a_kind_that_lacks_fields_is_refused() -> None:
    for message in MESSAGES:
        version, kind, *fields = json.loads(encode(message))
        for wrong in ([*fields, None], fields[:-1], ["2", *fields[1:]], [True, *fields[1:]]):
            with pytest.raises(ControlMessageError):
                read_message(json.dumps([version, kind, *wrong]).encode())
