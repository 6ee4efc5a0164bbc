"""Has ranks ended without which the others can go on; imported when a worker first complains.

    worker --"timed out", "lost contact"--> agent --> the agent that coordinates
    the agent that coordinates --"end rank"--> the agent of the rank at fault

Failures to reach another agent are ignored: then the workers' errors stay what they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rallypoint.launch.agent.agent_messages import ContactLost, TimedOut
from rallypoint.launch.agent.call_timeouts import TimedOutCalls
from rallypoint.launch.agent.lost_contact import LostContacts
from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.rounds.source import RoundSource
from rallypoint.rendezvous.job.decision import Decision


class ComplaintWatch:
    """The watch of one agent.

    Args:
        world_size: the number of ranks of the present round.
        perform: performs the decisions of `state` about the ranks at fault.
    """

    def __init__(
        self,
        rounds: RoundSource,
        state: NodeState,
        *,
        world_size: Callable[[], int],
        perform: Callable[[Decision], None],
    ) -> None:
        self._rounds, self._state = rounds, state
        self._world_size, self._perform = world_size, perform
        self._round = -1
        self._calls, self._contacts = TimedOutCalls(0), LostContacts(0)

    @property
    def wake_at(self) -> float | None:
        """When to call `tick`; None: nothing is to be judged."""
        alarms = (self._calls.judge_at, self._contacts.judge_at)
        return min((each for each in alarms if each is not None), default=None)

    def complains(self, report: TimedOut | ContactLost) -> None:
        """A worker of this node complains."""
        roster = self._rounds.roster()
        if roster is not None and roster.leader not in ("", roster.me):
            self._rounds.inquire(roster.leader, report.to_bytes())
        else:
            self.heard(report)

    def heard(self, report: TimedOut | ContactLost) -> None:
        """A worker of any node complains."""
        if report.round != self._state.round:
            return
        if self._round != report.round:
            self._round, size = report.round, self._world_size()
            self._calls, self._contacts = TimedOutCalls(size), LostContacts(size)
        now = time.monotonic()
        if isinstance(report, TimedOut):
            self._calls.report(report.rank, report.culprit, report.ranks, now)
        else:
            self._contacts.report(report.rank, report.culprit, now, had_formed=report.had_formed)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._round != self._state.round:  # what was complained of is over
            self._calls, self._contacts = TimedOutCalls(0), LostContacts(0)
        calls, contacts = self._calls, self._contacts
        if calls.judge_at is not None and now >= calls.judge_at:
            self._perform(self._state.calls_timed_out(calls.judge()))
        if contacts.judge_at is not None and now >= contacts.judge_at:
            at_fault = contacts.judge(self._nodes().__getitem__)
            self._perform(self._state.contact_lost(at_fault))

    def _nodes(self) -> dict[int, int]:
        """By rank, the number of its node."""
        roster, size = self._rounds.roster(), self._world_size()
        members = () if roster is None else sorted(roster.members, key=lambda each: each.node_rank)
        nodes = [each.node_rank for each in members for _ in range(each.size)]
        return dict(enumerate(nodes if len(nodes) == size else range(size)))
