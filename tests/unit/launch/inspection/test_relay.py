"""Agents that look for each other: who is asked, who answers, and what makes no sense."""

from __future__ import annotations

import json
import random
import selectors
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.launch.inspection.relay import (
    ContactLost,
    EndRank,
    LongWaits,
    Look,
    Relay,
    TimedOut,
    Told,
)
from rallypoint.launch.inspection.requests import Reply
from rallypoint.launch.rounds.source import Colleague, Roster, RoundSource
from rallypoint.rendezvous.job.reports import NodeReport


class Agents:
    """Some agents, the first of which coordinates; what one says to another comes at once."""

    def __init__(self, count: int, *, stopped: tuple[int, ...] = ()) -> None:
        members = tuple(Colleague(f"key{i}", i, f"host{i}", 2, 0.0) for i in range(count))
        self.stopped = stopped
        self.rounds = [Connected(self, i, members) for i in range(count)]
        self.told: list[tuple[int, Told]] = []  # by the agent that heard it
        self.relays = [
            Relay(rounds, self._look(i), self._hear(i)) for i, rounds in enumerate(self.rounds)
        ]

    def _look(self, number: int) -> Look:
        def look(reply: Reply, trace_s: float) -> None:
            if trace_s:
                reply({"trace": f"{number} for {trace_s:g} s"})
            else:
                reply({"first": {}, "second": {"node_rank": number}})

        return look

    def _hear(self, number: int) -> Callable[[Told], None]:
        return lambda told: self.told.append((number, told))

    def ask(self, number: int, **how: float) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        reply: Reply = told.append
        self.relays[number].ask(reply, **how)
        return told


class Connected(RoundSource):
    """An agent's connections to the others."""

    def __init__(self, agents: Agents, number: int, members: tuple[Colleague, ...]) -> None:
        super().__init__(f"key{number}")
        self._agents, self._members = agents, members

    def roster(self) -> Roster:
        leads = self.key == "key0"
        return Roster(me=self.key, leader="key0", members=self._members if leads else ())

    def inquire(self, key: str, payload: bytes) -> None:
        number = int(key.removeprefix("key"))
        if number not in self._agents.stopped:
            self._agents.relays[number].heard(self.key, payload)

    def open(self, selector: selectors.BaseSelector) -> None: ...

    def tell(self, report: NodeReport) -> None: ...

    def tick(self) -> None: ...

    def settle(self) -> None: ...

    def close(self) -> None: ...


def test_each_agent_gets_all_others() -> None:
    agents = Agents(4)
    for asking in range(4):
        members, *rest = agents.ask(asking)
        assert [each["is_asking"] for each in members["members"]] == [i == asking for i in range(4)]
        assert [each["ranks"] for each in members["members"]] == [[0, 2], [2, 4], [4, 6], [6, 8]]
        coming = sorted(str(each["key"]) for each in rest if each["ask"] == "coming")
        assert coming == [f"key{i}" for i in range(4) if i != asking]
        seen = sorted(each["second"]["node_rank"] for each in rest if each["ask"] == "node")
        assert seen == [i for i in range(4) if i != asking]


def test_each_agent_traces_for_as_long_as_it_is_asked_to() -> None:
    for asking in range(3):
        _, *rest = Agents(3).ask(asking, trace_s=2.5)
        traces = sorted(each["trace"] for each in rest if each["ask"] == "node")
        assert traces == [f"{i} for 2.5 s" for i in range(3) if i != asking]


def test_one_that_is_stopped_is_missing() -> None:
    _, *rest = Agents(3, stopped=(2,)).ask(1)
    assert {each.get("key") for each in rest if each["ask"] == "coming"} == {"key0"}


def test_without_a_coordinator_nobody_is_asked() -> None:
    (told,) = Agents(3, stopped=(0,)).ask(2) or [{}]
    assert told == {}


def test_who_coordinates_hears_of_long_waits() -> None:
    agents = Agents(3)
    waits = LongWaits(2, 5, 31.5, is_over=False)
    agents.rounds[2].inquire("key0", waits.to_bytes())
    agents.rounds[1].inquire("key0", b'{"ask": "wait", "number": 5, "round": "x"}')
    stopped = LongWaits(2, 4, 3.0, is_over=True, is_stopped=True)
    agents.rounds[1].inquire("key0", stopped.to_bytes())
    assert agents.told == [(0, waits), (0, stopped)]


def test_who_coordinates_hears_of_timeouts_and_has_ranks_ended() -> None:
    agents = Agents(3)
    late = TimedOut(2, 5, 1, (1, 5))
    agents.rounds[2].inquire("key0", late.to_bytes())
    assert agents.told == [(0, late)]
    order = EndRank(2, 1, "it is late")
    agents.relays[0].end_rank(order)
    assert agents.told[1:] == [(1, order), (2, order)]
    agents.relays[1].end_rank(order)
    agents.rounds[1].inquire("key2", order.to_bytes())  # it does not coordinate
    assert len(agents.told) == 3


@pytest.mark.parametrize("had_formed", [False, True])
def test_who_coordinates_hears_of_lost_contact(had_formed: bool) -> None:
    agents = Agents(3)
    lost = ContactLost(2, 5, -1, had_formed)
    agents.rounds[2].inquire("key0", lost.to_bytes())
    agents.rounds[1].inquire("key0", b'{"ask": "lost contact", "number": 5, "round": 2}')
    assert agents.told == [(0, lost)]


def test_nonsense_is_left_out(seed: int) -> None:
    chance = random.Random(seed)
    agents = Agents(3)
    words: list[object] = [
        "look",
        "node",
        "others",
        "members",
        "coming",
        "wait",
        "timed out",
        "end rank",
        "key1",
        "key9",
        None,
        7,
    ]
    for _ in range(2000):
        keys = ("ask", "number", "asker", "key", "members", "to", "first")
        message = {key: chance.choice(words) for key in chance.sample(keys, chance.randrange(7))}
        if chance.random() < 0.7:
            message["number"] = chance.randrange(3)
        data = json.dumps(message).encode()
        if chance.random() < 0.2:
            data = data[: chance.randrange(len(data) + 1)]
        agents.relays[chance.randrange(3)].heard(f"key{chance.randrange(3)}", data)
    assert len(agents.ask(1)) == 5
