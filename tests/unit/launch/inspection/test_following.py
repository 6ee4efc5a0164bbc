"""Agents whose job is followed: who reads, whom the lines reach, and that all of it ends."""

from __future__ import annotations

import json
import random
import selectors
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rallypoint.launch.agent.answers import read_message
from rallypoint.launch.inspection.following import (
    LEASE_S,
    RENEW_S,
    Following,
    FollowMessage,
)
from rallypoint.launch.rounds.source import AgentInfo, Roster, RoundSource
from rallypoint.rendezvous.job.reports import NodeReport


@dataclass
class Process:
    """A process that reads a node, whenever it is told to."""

    receive: Callable[[str], None]
    is_wanted: Callable[[], bool]
    is_over: bool = False

    def close(self) -> None:
        self.is_over = True


@dataclass
class Program:
    """A program that follows the job."""

    lines: list[str] = field(default_factory=list)
    listens: bool = True

    def tell(self, line: str) -> bool:
        self.lines += [line] * self.listens
        return self.listens

    @property
    def told(self) -> list[str]:
        """What it was told since the last time, without the names of nodes."""
        lines, self.lines = self.lines, []
        return [line for line in lines if not line.startswith("{")]


class Agents:
    """The agents of a job; `leader` coordinates, and those in `cut` hear nobody."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self.leader = 0
        self.cut: set[int] = set()
        self.said: list[tuple[str, str, type]] = []
        self.processes: list[list[Process]] = [[] for _ in range(count)]
        self.rounds = [Connected(self, i, count) for i in range(count)]
        self.agents = [
            Following(rounds, self._start(i), lambda: self.now)  # type: ignore[arg-type]
            for i, rounds in enumerate(self.rounds)
        ]

    def _start(self, number: int) -> Callable[..., Process]:
        def start(*how: Callable[..., object]) -> Process:
            self.processes[number].append(Process(*how))  # type: ignore[arg-type]
            return self.processes[number][-1]

        return start

    def read_all(self) -> list[int]:
        """A second passes, and each process reads its node; which nodes were read."""
        self.now += 1.0
        read = []
        for number, processes in enumerate(self.processes):
            for process in processes:
                if not process.is_over and process.is_wanted():
                    read.append(number)
                    process.receive(f"{number} at {self.now:g}")
                else:
                    process.is_over = True
        return read


class Connected(RoundSource):
    """An agent's connections to the others."""

    def __init__(self, agents: Agents, number: int, count: int) -> None:
        super().__init__(f"key{number}")
        self._agents, self._number, self._count = agents, number, count

    def roster(self) -> Roster | None:
        if self._count == 1:
            return None
        leads = self._agents.leader == self._number
        members = tuple(AgentInfo(f"key{i}", i, f"host{i}", 2, 0.0) for i in range(self._count))
        return Roster(
            me=self.key, leader=f"key{self._agents.leader}", members=members if leads else ()
        )

    def inquire(self, key: str, payload: bytes) -> None:
        message = read_message(payload)
        assert isinstance(message, FollowMessage)
        self._agents.said.append((self.key, key, type(message)))
        to = int(key.removeprefix("key"))
        if not {to, self._number} & self._agents.cut:
            self._agents.agents[to].heard(self.key, message)

    def open(self, selector: selectors.BaseSelector) -> None: ...

    def tell(self, report: NodeReport) -> None: ...

    def tick(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("count", [1, 3])
def test_all_nodes_are_read_for_whoever_follows(count: int) -> None:
    for asking in range(count):
        agents, program = Agents(count), Program()
        agents.agents[asking].ask(program.tell)
        (names,) = program.lines
        nodes = json.loads(names)["nodes"]
        assert [each["host"] for each in nodes] == [f"host{i}" for i in range(count) if count > 1]
        program.lines.clear()
        assert agents.read_all() == list(range(count))
        assert sorted(program.told) == [f"{i} at 1" for i in range(count)]


def test_who_follows_one_node_costs_no_other_agent_anything() -> None:
    agents, program = Agents(3), Program()
    agents.agents[1].ask_node(program.tell)
    assert program.lines == ['{"nodes":[]}']
    assert agents.read_all() == [1]
    assert program.told == ["1 at 1"]
    assert agents.said == []
    for leader in (0, 1):  # others follow the whole job, which does not concern it
        agents.leader, agents.now = leader, agents.now + RENEW_S
        whole = Program()
        agents.agents[1].ask(whole.tell)
        assert agents.read_all() == [0, 1, 2]
        assert len(whole.told) >= 3
        assert program.lines == [f"1 at {agents.now:g}"]
        program.lines.clear()
    while agents.read_all():
        assert agents.now < 2 * LEASE_S + 2


def test_two_programs_share_what_is_read() -> None:
    agents, programs = Agents(3), [Program(), Program(), Program()]
    for asking, program in zip((1, 1, 2), programs, strict=True):
        agents.agents[asking].ask(program.tell)
        agents.agents[asking].ask(program.tell)  # again
    assert agents.read_all() == [0, 1, 2]
    assert [sorted(each.told) for each in programs] == [["0 at 1", "1 at 1", "2 at 1"]] * 3
    assert [len(each) for each in agents.processes] == [1, 1, 1]
    between = [each[:2] for each in agents.said if each[2].__name__ == "FromNode"]
    assert sorted(between) == [("key1", "key0"), ("key2", "key0")]  # once for all who ask


def test_without_renewal_all_of_it_ends() -> None:
    agents, program = Agents(3), Program()
    agents.agents[1].ask(program.tell)
    while agents.now < LEASE_S - 1.5:
        assert agents.read_all() == [0, 1, 2]
    agents.read_all()
    agents.read_all()
    agents.said.clear()
    assert agents.read_all() == []
    assert agents.said == []


def test_a_new_coordinator_is_found_by_the_next_request() -> None:
    agents, program = Agents(3), Program()
    agents.agents[1].ask(program.tell)
    agents.read_all()
    agents.leader, agents.cut = 2, {0}
    program.lines.clear()
    agents.now += RENEW_S
    agents.agents[1].ask(program.tell)
    agents.read_all()
    assert sorted(program.told) == ["1 at 5", "2 at 5"]
    agents.cut = set()  # the old one is there again: nothing comes twice for long, or in circles
    for _ in range(20):
        agents.now += RENEW_S
        agents.agents[1].ask(program.tell)
        agents.said.clear()
        agents.read_all()
        assert len(agents.said) <= 8
    assert len(agents.said) == 4  # two lines to the coordinator, two to the one who asked
    assert {f"{i} at {agents.now:g}" for i in range(3)} < set(program.told)


def test_one_that_is_cut_off_tells_nothing_and_its_own_node_stays() -> None:
    agents, far, near = Agents(3), Program(), Program()
    agents.cut = {2}
    agents.agents[1].ask(far.tell)
    agents.agents[2].ask(near.tell)
    agents.read_all()
    assert sorted(far.told) == ["0 at 1", "1 at 1"]
    assert near.told == ["2 at 1"]


def test_a_process_that_has_ended_is_started_again() -> None:
    agents, program = Agents(1), Program()
    agents.agents[0].ask(program.tell)
    agents.processes[0][0].close()
    assert agents.read_all() == []
    agents.agents[0].ask(program.tell)
    assert agents.read_all() == [0]
    assert len(agents.processes[0]) == 2


def test_programs_that_have_gone_are_forgotten_and_too_many_refused() -> None:
    agents = Agents(1)
    programs = [Program() for _ in range(17)]
    for program in programs:
        agents.agents[0].ask(program.tell)
    assert "end one of them" in json.loads(programs[16].lines[-1])["error"]
    programs[3].listens = False
    agents.read_all()
    assert [bool(each.told) for each in programs[:5]] == [True, True, True, False, True]
    agents.agents[0].ask(programs[16].tell)
    agents.read_all()
    assert programs[16].told == ["0 at 2"]


def test_any_order_of_events_ends_quietly(seed: int) -> None:
    chance = random.Random(seed)
    agents = Agents(4)
    programs = [(chance.randrange(4), Program()) for _ in range(6)]
    for _ in range(300):
        agents.leader = chance.choice([agents.leader] * 9 + [chance.randrange(4)])
        agents.cut = {i for i in agents.cut if chance.random() < 0.8}
        if chance.random() < 0.1:
            agents.cut.add(chance.randrange(4))
        number, program = chance.choice(programs)
        agents.agents[number].ask(program.tell)
        before = len(agents.said)
        agents.read_all()
        assert len(agents.said) - before < 40
        for processes in agents.processes:
            assert sum(not each.is_over for each in processes) <= 1
    agents.now += LEASE_S
    agents.read_all()
    assert agents.read_all() == []
