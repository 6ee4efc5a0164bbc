"""An agent ends workers for a hang only if the hang is not over by then."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.launch.agent.test_complaints import explanation_of

from rallypoint.launch.agent import complaint_watch as watch_module
from rallypoint.launch.agent.complaint_watch import ComplaintWatch
from rallypoint.launch.agent.local_workers import AgentParts
from rallypoint.launch.job import OnHang


class Agent:
    """An agent whose rank 0 has waited for too long; what the inspection finds comes at once.

    Args:
        at_read: called with the watch when the agent reads what workers have sent.
    """

    def __init__(self, on_hang: OnHang, at_read: Callable[[Agent], None]) -> None:
        self.told: list[str] = []
        self.performed: list[object] = []
        self.inspected = self.forgotten = 0
        self._at_read = at_read
        everything: Any = SimpleNamespace(
            on_hang=on_hang,
            least_hang_s=5.0,
            roster=lambda: None,
            round=0,
            is_under_way=True,
            hangs=lambda past, rank, now, ends_job: past,
            world_size=3,
            steps=lambda: None,
            evidence=SimpleNamespace(records=SimpleNamespace(seen_ns=0), forget=self._forget),
        )
        progress: Any = SimpleNamespace(
            hangs=lambda text, event, steps: self.told.append("hangs"),
            goes_on=lambda rank, waited_s, was_stopped: self.told.append("goes on"),
        )
        self.watch = ComplaintWatch(
            AgentParts(
                job=everything,
                selector=everything,
                rounds=everything,
                state=everything,
                workers=everything,
                progress=progress,
                perform=self.performed.append,
                inspect=self._inspect,
                read_workers=lambda: self._at_read(self),
            )
        )

    def _inspect(self) -> None:
        self.inspected += 1

    def _forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def receive(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[object], None]]:
    """What processes that inspect would call."""
    started: list[Callable[[object], None]] = []
    monkeypatch.setattr(watch_module, "Child", lambda _, words, receive: started.append(receive))
    return started


def found(receive: list[Callable[[object], None]], agent: Agent) -> None:
    agent.watch.waits(0, 6.0)
    (inspected,) = receive
    inspected({**explanation_of(waiting=(0,)), "round": 0})


@pytest.mark.parametrize("on_hang", [OnHang.STOP, OnHang.RESTART])
def test_a_hang_that_lasts(on_hang: OnHang, receive: list[Callable[[object], None]]) -> None:
    agent = Agent(on_hang, lambda agent: None)
    found(receive, agent)
    assert agent.told == ["hangs"]
    assert len(agent.performed) == 1
    assert not agent.forgotten


def test_one_that_was_over_before_it_was_reported(
    receive: list[Callable[[object], None]],
) -> None:
    agent = Agent(OnHang.STOP, lambda agent: agent.watch.waits(0, 6.1, is_over=True))
    found(receive, agent)
    assert agent.told == agent.performed == []


def test_one_that_is_over_as_the_workers_are_inspected(
    receive: list[Callable[[object], None]],
) -> None:
    def goes_on(agent: Agent) -> None:
        if agent.inspected:
            agent.watch.waits(0, 6.1, is_over=True)

    agent = Agent(OnHang.STOP, goes_on)
    found(receive, agent)
    assert agent.told == ["hangs", "goes on"]
    assert agent.performed == []
    assert agent.forgotten
