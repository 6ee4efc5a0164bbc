"""Carries workers' complaints to the agent that coordinates, and performs what follows from them.

    worker --complaint--> its agent --> the agent that coordinates --> a process that inspects
                                                                   --> the agent of a rank at fault

The coordinating agent does this for all nodes, so there is one line and one decision. Imported when
a worker first complains. Failures are ignored, because they must not disturb the job: then the
workers' errors stay what they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from rallypoint.base.control_message import CallTimedOut, LongWait, LostContact
from rallypoint.base.ready import earliest
from rallypoint.launch.agent.complaints import (
    STOPPED_SHARE,
    Complaint,
    ContactLost,
    Hang,
    Hangs,
    LongWaits,
    LostContacts,
    TimedOut,
    TimedOutCalls,
)
from rallypoint.launch.agent.local_workers import AgentParts
from rallypoint.launch.agent.node import NodeDecision
from rallypoint.launch.inspection.child import Child
from rallypoint.launch.job import OnHang
from rallypoint.rendezvous.transport.codec import encode

_BETWEEN_STOPPED_S = 0.03  # the two samples: that it does not move, its agent has seen
_AGAIN_S = 2.0  # the round ends within milliseconds once all have received what they should
_CALM = 0.5  # of the time until a wait is long: it is not checked more often


class ComplaintWatch:
    """The watch of one agent."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._rounds, self._state, self._workers = parts.rounds, parts.state, parts.workers
        self._after_s = parts.job.least_hang_s
        self._child: Child | None = None
        self._calm_s = 0.0
        self._begin()

    def _begin_if_new(self) -> None:
        if self._round != self._state.round:  # what was complained of is over
            self._begin()

    def _begin(self) -> None:
        """Nothing has been complained of in this round."""
        self._round, self._calm_until = self._state.round, 0.0
        self._repeated: list[Callable[[], None]] = []  # what others may not have received
        self._again_at: float | None = None
        size = self._workers.world_size
        self._hangs = Hangs(self._after_s)
        self._calls, self._contacts = TimedOutCalls(size), LostContacts(size)

    @property
    def wake_at(self) -> float | None:
        """When to call `tick`; None: nothing is to be judged."""
        return earliest(self._calls.judge_at, self._contacts.judge_at, self._again_at)

    def complains(self, rank: int, message: LongWait | CallTimedOut | LostContact) -> None:
        """A worker of this node complains."""
        complaint: Complaint
        match message:
            case LongWait(seconds, is_over):
                return self.waits(rank, seconds, is_over=is_over)
            case CallTimedOut(number, culprit, ranks):
                complaint = TimedOut(number, rank, culprit, ranks)
            case LostContact(number, culprit, had_formed):
                complaint = ContactLost(number, rank, culprit, had_formed)
        if complaint.round == self._state.round:
            self._begin_if_new()
            self._pass_on(complaint)
            self._repeat(lambda: self._pass_on(complaint))
        return None

    def waits(
        self, rank: int, seconds: float, *, is_over: bool = False, is_stopped: bool = False
    ) -> None:
        """A worker of this node has waited this long, and still waits unless it `is_over`.

        With `is_stopped`, it has been stopped by a signal for this long.
        """
        self._pass_on(LongWaits(self._state.round, rank, seconds, is_over, is_stopped))

    def _pass_on(self, complaint: Complaint) -> None:
        with suppress(Exception):
            roster = self._rounds.roster()
            if roster is not None and roster.leader not in ("", roster.me):
                self._rounds.inquire(roster.leader, encode(complaint))
            else:
                self.heard(complaint)

    def heard(self, complaint: Complaint) -> None:
        """A worker of any node complains, and this agent coordinates."""
        if complaint.round != self._state.round:
            return
        self._begin_if_new()
        now = time.monotonic()
        with suppress(Exception):
            match complaint:
                case LongWaits():
                    self._wait_heard(complaint)
                case TimedOut(_, rank, culprit, ranks):
                    self._calls.report(rank, culprit, ranks, now)
                case ContactLost(_, rank, culprit, had_formed):
                    self._contacts.report(rank, culprit, now, had_formed=had_formed)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._begin_if_new()
        calls, contacts = self._calls, self._contacts
        if calls.judge_at is not None and now >= calls.judge_at:
            self._decide(self._state.calls_timed_out, calls.judge())
        if contacts.judge_at is not None and now >= contacts.judge_at:
            at_fault = contacts.judge(self._nodes().__getitem__)
            self._decide(self._state.contact_lost, at_fault)
        if self._again_at is not None and now >= self._again_at:
            self._again_at = now + _AGAIN_S
            for again in self._repeated:
                again()

    def _decide(self, decide: Callable[[list[int]], NodeDecision], at_fault: list[int]) -> None:
        """Perform that; what is ordered to others, again."""
        elsewhere = [rank for rank in at_fault if rank not in self._state.group.running]
        if elsewhere:
            self._repeat(lambda: self._parts.perform(decide(elsewhere)))
        self._parts.perform(decide(at_fault))

    def _repeat(self, what: Callable[[], None]) -> None:
        """Do it again while the round goes on: a message to another agent may be lost."""
        self._repeated.append(what)
        if self._again_at is None:
            self._again_at = time.monotonic() + _AGAIN_S

    def close(self) -> None:
        """Stop watching."""
        if self._child is not None:
            self._child.close()

    def _nodes(self) -> dict[int, int]:
        """By rank, the number of its node."""
        roster, size = self._rounds.roster(), self._workers.world_size
        members = () if roster is None else sorted(roster.members, key=lambda each: each.node_rank)
        nodes = [each.node_rank for each in members for _ in range(each.size)]
        return dict(enumerate(nodes if len(nodes) == size else range(size)))

    # Hangs.

    def _wait_heard(self, waits: LongWaits) -> None:
        if waits.is_over:
            if self._hangs.goes_on(waits.rank, was_stopped=waits.is_stopped):
                self._parts.progress.goes_on(waits.rank, waits.seconds, waits.is_stopped)
            return
        self._hangs.complains(waits.rank)
        if self._child is None and time.monotonic() >= self._calm_until:
            self._calm_s = _CALM * self._after_s * (STOPPED_SHARE if waits.is_stopped else 1.0)
            between = [str(_BETWEEN_STOPPED_S)] if waits.is_stopped else []
            words = ["job", str(os.getpid()), *between]
            self._child = Child(self._parts.selector, words, self._inspected)

    def _inspected(self, explanation: dict[str, object] | None) -> None:
        self._child = None
        self._calm_until = time.monotonic() + self._calm_s
        # Meanwhile the workers may have ended, or be others.
        is_current = self._round == self._state.round and self._state.is_under_way
        if explanation is None or not is_current or explanation.get("round") != self._round:
            return
        with suppress(Exception):
            self._parts.read_workers()  # some may have stopped waiting since they were inspected
            hang = self._hangs.judge(explanation)
            if hang is not None:
                self._found(hang)

    def _found(self, hang: Hang) -> None:
        self._parts.progress.hangs(hang.text, hang.event, self._parts.workers.steps())
        on_hang = self._parts.job.on_hang
        if on_hang in (OnHang.RESTART, OnHang.STOP):
            evidence = self._workers.evidence
            is_first = evidence is not None and not evidence.records.seen_ns
            self._parts.inspect()
            self._parts.read_workers()
            if not self._hangs.is_reported:  # it was over while the workers were inspected
                if evidence is not None and is_first:
                    evidence.forget()
                return
            ends_job = on_hang is OnHang.STOP
            now = time.monotonic()
            self._parts.perform(self._state.hangs(hang.past, hang.rank, now, ends_job=ends_job))
