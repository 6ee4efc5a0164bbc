"""Has ranks ended that others waited for until their calls timed out; imported only then.

    worker --"timed out"--> agent --> the agent that coordinates --"end rank"--> that rank's agent

Failures to reach another agent are ignored: then the workers' errors stay what they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.agent.timeouts import TimedOutCalls
from rallypoint.launch.inspection.relay import TimedOut
from rallypoint.launch.rounds.source import RoundSource


class TimeoutWatch:
    """The watch of one agent.

    Args:
        world_size: the number of ranks of the present round.
        judged: called with the ranks at fault.
    """

    def __init__(
        self,
        rounds: RoundSource,
        state: NodeState,
        *,
        world_size: Callable[[], int],
        judged: Callable[[list[int]], None],
    ) -> None:
        self._rounds, self._state = rounds, state
        self._world_size, self._judged = world_size, judged
        self._round = -1
        self._calls = TimedOutCalls(0)

    @property
    def wake_at(self) -> float | None:
        """When to call `tick`; None: nothing is to be judged."""
        return self._calls.judge_at

    def complains(self, report: TimedOut) -> None:
        """A call of a worker of this node timed out."""
        roster = self._rounds.roster()
        if roster is not None and roster.leader not in ("", roster.me):
            self._rounds.inquire(roster.leader, report.to_bytes())
        else:
            self.heard(report)

    def heard(self, report: TimedOut) -> None:
        """A call of any node's worker timed out."""
        if report.round != self._state.round:
            return
        if self._round != report.round:
            self._round, self._calls = report.round, TimedOutCalls(self._world_size())
        self._calls.report(report.rank, report.culprit, report.ranks, time.monotonic())

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.wake_at is not None and now >= self.wake_at:
            at_fault = self._calls.judge()
            if self._round == self._state.round:
                self._judged(at_fault)
