"""Decides for the whole job when a round begins and must stop; what follows: restart_policy.py.

    GATHERING --all nodes are here--> RUNNING --a failure, a stop, all ended--> STOPPING
        ^                                                      --all nodes ended--> DONE
        \\--restart, resize-------------------------------------------/

What agents report and `now` go in; orders to all agents and their reason come out. One agent runs
this for all; a job of one machine runs it too. Who takes part is gathering.py's, and what
comes after a round restart_policy.py's. No socket, clock or process here.
"""

from __future__ import annotations

from enum import Enum

from rallypoint.base.record import Record
from rallypoint.base.wording import brief
from rallypoint.rendezvous.job.gathering import Flapping, Gathering, Limits, ShortLives
from rallypoint.rendezvous.job.reports import (
    NOTHING,
    Decision,
    Ending,
    Finish,
    NodeReport,
    Notice,
    Outcome,
    RankFailure,
    Refuse,
    Stop,
)
from rallypoint.rendezvous.job.restart_policy import RoundEnd, judge
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.job.round_state import RoundState

_NEW = NodeReport()  # of an agent that knows of no round
_NOTICES_S = (10.0, 30.0, 60.0, 120.0)
# Workers that were started together get ready one after the other; they join with one round.
BATCH_S = 0.5


def next_notice(began: float, now: float) -> float:
    """When to report next that a node waits: 10, 30, 60, 120 s after it began, and then doubled.

    It is later than `now`, also after rounding: a caller woken at that time has something to
    report.
    """
    after_s = next((each for each in _NOTICES_S if began + each > now), _NOTICES_S[-1])
    while began + after_s <= now:
        after_s *= 2
    return began + after_s


class OpenRound(Record, kw_only=True):
    """Open an empty worker store, and order all members to start."""

    number: int
    members: tuple[Member, ...]
    because: str
    is_urgent: bool = True
    may_replace: bool = False


class JobStage(Enum):
    """Where the job stands. Workers may run in RUNNING and STOPPING; DONE: its end is decided."""

    GATHERING = "gathering"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


_MOVES: dict[JobStage, tuple[JobStage, ...]] = {
    JobStage.GATHERING: (JobStage.RUNNING, JobStage.DONE),
    JobStage.RUNNING: (JobStage.STOPPING, JobStage.GATHERING, JobStage.DONE),
    JobStage.STOPPING: (JobStage.GATHERING, JobStage.DONE),
    JobStage.DONE: (),
}


JobAction = OpenRound | Stop | Finish | Notice | Refuse
JobDecision = Decision[JobAction]


class Coordinator:
    """The job. Each method takes one event and returns one `Decision`.

    Members join and leave by their keys, free of charge; only failures are charged.

    Attributes:
        current: the newest round, also once it is over.
        gathering: the members that are present, in that round or not.
    """

    def __init__(self, limits: Limits, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.stage = JobStage.GATHERING
        self.round = -1
        self._known_round = -1  # the newest one that a node here has seen, also of another job
        self.restarts = 0
        self.wake_at: float | None = None
        self.current = RoundState()
        self._stop_order: Stop | None = None
        self._reports: dict[str, NodeReport] = {}  # each member's newest, by key
        self._ranks: tuple[Member, ...] = ()  # of the newest round that began
        self._ranks_before: tuple[Member, ...] = ()
        self.gathering = Gathering(limits)
        self._flapping = Flapping()
        self._short_lives = ShortLives()
        self._stop_asked = ""
        self._because = ""  # why there is to be a new round
        self._is_urgent = True
        self._may_replace = False
        self._opened_at = self._notice_at = 0.0
        self._began_at = 0.0

    @classmethod
    def resumed(
        cls,
        limits: Limits,
        max_restarts: int,
        *,
        members: tuple[Member, ...],
        round_number: int,
        runs: bool,
        restarts: int,
        now: float,
    ) -> Coordinator:
        """Continue where another coordinator was lost: with its last list of members, and that
        round if it runs. Absent members are lost later, as usual; if nothing runs, they join again.
        """
        self = cls(limits, max_restarts)
        self.round, self.restarts = round_number, restarts
        self._begin(members, is_taken_over=runs)
        self.opened(now)
        if runs:
            for member in members:
                self.gathering.join(member, now)
            self._move(JobStage.RUNNING)
            self.wake_at = None
        elif round_number >= 0:
            self.gathering.expect({member.key for member in members})
            self._because = "the coordinator changed"
        return self

    def opened(self, now: float) -> JobDecision:
        """Nodes may join from now on."""
        self.gathering.open(now)
        self._opened_at, self._notice_at = now, next_notice(now, now)
        self._set_alarm()
        return NOTHING

    def joined(self, member: Member, now: float, report: NodeReport = _NEW) -> JobDecision:
        """A node's agent joins, with what it knows of rounds before."""
        if self.stage is JobStage.DONE:
            return Decision(
                (Refuse(member.key, "the job is over"),), f"{member.host} joined after the end"
            )
        if member.key in self.gathering.here:
            return NOTHING
        refusal = self.gathering.join(member, now)
        if refusal:
            return Decision((Refuse(member.key, refusal),), f"{member.host} was refused: {refusal}")
        self._known_round = max(self._known_round, report.round)
        self._note_survivors(member.key, report)
        came = f"{member.host} joined"
        match self.stage:
            case JobStage.GATHERING:
                return self._open_if_complete(now, otherwise=Decision((), came))
            # A new round would throw away what some have finished; newcomers have to wait.
            case JobStage.RUNNING if self._has_room() and not self.current.is_finishing:
                self.current.came.append(member.host)
                pause_s = self._flapping.pause_s(now)
                in_s = self._began_at + pause_s - now
                is_due = not pause_s or in_s <= 0
                return self._stop(came, Ending.ADMIT) if is_due else self._delay(came, in_s, now)
        return Decision((), f"{came}, and waits for the next round")

    def reported(self, key: str, report: NodeReport, now: float) -> JobDecision:
        """A member's agent reports: what is new in it counts, however often it comes."""
        before, self._reports[key] = self._reports.get(key), report
        if report == before:
            return NOTHING
        decided: JobDecision = NOTHING
        if report.broken and self._runs(key, report):
            self.current.broke(key)
            decided += self._stop(report.broken)
        if report.stop_asked and not self._stop_asked:
            decided += self._stop_was_asked(report.stop_asked)
        if report.leaves and key not in self.current.leaving:
            decided += self._leaves(key, report.leaves, now)
        self._note_survivors(key, report)
        if not self._runs(key, report):
            return decided
        if report.is_finishing:
            self.current.is_finishing = True
        if report.is_over:
            return decided + self._ended(key, report, now)
        has_grown = self.current.grown(key, report.ready)
        return decided + (self._admit_workers(now) if has_grown else NOTHING)

    def never_ran(self, key: str, now: float, *, was_cut_off: bool = False) -> JobDecision:
        """The round never began there, or how it ended is no longer known."""
        report = self._reports.get(key, _NEW).without(self.round)
        return self._ended(key, report.__replace__(was_cut_off=was_cut_off), now)

    def _ended(self, key: str, report: NodeReport, now: float) -> JobDecision:
        current = self.current
        if key in current.leaving and not report.succeeded:
            return self.node_lost(key, current.leaving[key], now)
        is_new = key in current.awaited
        why = current.ended(key, report)
        stopped = NOTHING if report.succeeded else self._stop(why)
        judged = self._judge_if_all_ended(now) if is_new else NOTHING
        return stopped + judged + self._admit_workers(now)  # its first report may be lost

    def _note_survivors(self, key: str, report: NodeReport) -> None:
        """Until the next round begins, also if another coordinator has ended the one before."""
        if self.stage is JobStage.GATHERING and report.is_over and key in self.current:
            has_it = report.round == self.round
            self.current.ended(key, report if has_it else report.without(self.round))

    def _stop_was_asked(self, text: str) -> JobDecision:
        self._stop_asked = text
        self.current.was_whole = not self.current.is_broken
        if self.stage is JobStage.GATHERING:
            return self._finish(Outcome.STOPPED, text)
        return self._stop(text)

    def _leaves(self, key: str, text: str, now: float) -> JobDecision:
        if not self._is_in_round(key) or self.current.has_ended(key):
            return self.node_lost(key, text, now)
        # A last checkpoint, say, must be written before others continue from it.
        self.current.leaving[key] = text
        return self._stop(f"{self.current.name_of(key)} leaves: {text}")

    def node_silent(self, key: str, why: str) -> JobDecision:
        """A member is not heard: end the round, while it may still return or be lost."""
        if not self._is_in_round(key) or self.current.has_ended(key):
            return NOTHING
        name = self.current.name_of(key)
        self.current.interrupted = f"{name} was silent"
        return self._stop(f"{name} is silent: {why}")

    def node_lost(self, key: str, why: str, now: float) -> JobDecision:
        """A member's agent is gone, and its workers with it."""
        member, current = self.gathering.leave(key), self.current
        self._reports.pop(key, None)
        current.leaving.pop(key, None)
        current.present.discard(key)
        if self.stage is JobStage.DONE or member is None:
            return NOTHING
        name = current.name_of(key, member.host)
        if self.stage is JobStage.GATHERING:
            current.forget(key)
            left: JobDecision = Decision((), f"{name} left before the start: {why}")
            return left + self._open_if_complete(now, otherwise=NOTHING)
        if key not in current:
            if self.stage is JobStage.RUNNING and member.host in current.came:
                current.came.remove(member.host)
            return Decision((), f"{name}, which waited for the next round, left: {why}")
        if not current.left(key, name, may_return=not self.gathering.limits.is_fixed):
            return Decision((), f"{name} left after its workers had succeeded: {why}")
        return self._stop(f"{name} was lost: {why}") + self._judge_if_all_ended(now)

    def tick(self, now: float) -> JobDecision:
        """Time has passed."""
        if self.wake_at is None or now < self.wake_at:
            return NOTHING
        if self.stage is JobStage.RUNNING:
            self.wake_at = None
            return self._admit()
        if self.gathering.is_complete(now):
            return self._open_if_complete(now, otherwise=NOTHING)
        text = self.gathering.text()
        if self.gathering.is_over(now):
            waited_s = self.gathering.limits.join_timeout_s
            advice = "start it there, or find out why it exited"
            return self._finish(Outcome.GIVEN_UP, f"{text}, after {waited_s:g} s; {advice}")
        notice: JobDecision = NOTHING
        if now >= self._notice_at:
            self._notice_at = next_notice(self._opened_at, now)
            notice = Decision((Notice(text),), "")
        self._set_alarm()
        return notice

    def revoked(self, now: float) -> JobDecision:
        """The latest round began nowhere: no rank comes from it, and no report of its end."""
        self._ranks = self._ranks_before
        decided: JobDecision = NOTHING
        for member in self.current.members:
            if self.expects(member.key):
                decided += self.never_ran(member.key, now)
        return decided

    @property
    def stopping(self) -> Stop | None:
        """The order that ends the newest round, until it is over."""
        return self._stop_order if self.stage is JobStage.STOPPING else None

    def is_running(self, round_number: int) -> bool:
        """Whether that round is to be started, or is running and not being ended."""
        return self.stage is JobStage.RUNNING and self.round == round_number

    @property
    def waiting(self) -> int:
        """The number of nodes that wait for the next round while one runs."""
        if self.stage is JobStage.GATHERING:
            return 0
        return len(self.gathering.here) - len(self.current.present)

    def expects(self, key: str) -> bool:
        """Whether the end of that member's workers is still to be reported."""
        return self._is_in_round(key) and key in self.current.awaited

    def _set_alarm(self) -> None:
        self.wake_at = min(self.gathering.wake_at, self._notice_at)

    def _has_room(self) -> bool:
        current = self.current
        gone = len(current.lost) + len(current.left_succeeded)  # as nodes without ranks do, too
        return len(current.members) - gone < self.gathering.limits.max_nodes

    def _is_in_round(self, key: str) -> bool:
        return self.stage in (JobStage.RUNNING, JobStage.STOPPING) and key in self.current

    def _runs(self, key: str, report: NodeReport) -> bool:
        return self._is_in_round(key) and report.round == self.round

    def _judge_if_all_ended(self, now: float) -> JobDecision:
        current, here = self.current, self.gathering.here
        if current.awaited:
            return NOTHING
        if not current.has_succeeded:
            for key in current.leaving:  # whose own workers had; it takes no part in another round
                self.gathering.leave(key)
        facts = RoundEnd(
            succeeded=current.has_succeeded,
            causes=current.causes,
            restarts_used=self.restarts,
            max_restarts=self.max_restarts,
            stop_asked=self._stop_asked,
            was_whole=current.was_whole,
            nodes_left=len(here),
            nodes_lost=current.missing(here),
            nodes_came=tuple(current.came),
            interrupted=current.why_interrupted(),
            min_nodes=self.gathering.limits.min_nodes,
            is_fixed=self.gathering.limits.is_fixed,
            unkillable=current.unkillable,
            survivors=current.survivors,
        )
        after = judge(facts)
        if after.outcome is not None:
            has_failed = after.outcome is Outcome.GIVEN_UP
            return self._finish(after.outcome, after.reason, facts.root if has_failed else None)
        if after.is_restart:
            self.restarts += not after.is_free
        elif not current.survivors:  # else it costs them milliseconds
            self._flapping.count(now, came=bool(current.came))
        newcomers_lost, others_lost = current.newcomers_lost, current.others_lost
        if current.survivors and (current.has_newcomers or others_lost):
            self._short_lives.count(
                now - self._began_at, newcomers_lost=newcomers_lost, others_lost=others_lost
            )
        self._move(JobStage.GATHERING)
        self._because = after.reason
        was_broken = current.is_broken or facts.root or facts.nodes_lost or facts.interrupted
        self._is_urgent = bool(was_broken)
        self._may_replace = after.is_restart
        self.opened(now)
        notices = [Notice(f"{after.reason}: {self.gathering.text()}")] if here else []
        return self._open_if_complete(now, otherwise=Decision(tuple(notices), after.reason))

    def _open_if_complete(self, now: float, *, otherwise: JobDecision) -> JobDecision:
        if not self.gathering.is_complete(now):
            self._set_alarm()
            return otherwise
        because, self._because = self._because, ""
        self._move(JobStage.RUNNING)
        may_join = now >= self._began_at + self._short_lives.pause_s  # rounded as where it is due
        self.wake_at, self._began_at = None, now
        self.round = max(self.round, self._known_round) + 1
        over = self.current
        members = over.seated(self.gathering.form(self._ranks), may_join=may_join)
        go_on = sum(member.size for member in members if member.taking_part > 0)
        self._begin(members, has_newcomers=go_on > over.survivors > 0)
        action = OpenRound(
            number=self.round,
            members=members,
            because=because,
            is_urgent=self._is_urgent,
            # Whatever emptied a place, and when: it is filled while restarts are left.
            may_replace=self._may_replace or self.restarts < self.max_restarts,
        )
        return Decision((action,), because or f"{len(members)} nodes have joined")

    def _begin(
        self,
        members: tuple[Member, ...],
        *,
        is_taken_over: bool = False,
        has_newcomers: bool = False,
    ) -> None:
        self.current = RoundState(members, is_taken_over=is_taken_over, has_newcomers=has_newcomers)
        self._ranks_before, self._ranks = self._ranks, members

    def _admit_workers(self, now: float) -> JobDecision:
        """Workers are ready for empty places: now, or soon with others, or after a pause."""
        current = self.current
        if self.stage is not JobStage.RUNNING or current.is_finishing or not current.joining:
            return NOTHING
        pause_s = self._short_lives.pause_s
        due_at = max(self._began_at + pause_s, now if current.is_complete else now + BATCH_S)
        if due_at <= now:
            return self._admit()
        is_announced = self.wake_at is not None
        self._wake_by(due_at)
        text = f"{', '.join(current.joining)} will join in {brief(due_at - now)}"
        if is_announced or due_at <= now + BATCH_S:
            return Decision((), text)
        return Decision((Notice(f"{text}, as {self._short_lives.text}"),), text)

    def _admit(self) -> JobDecision:
        """End the round, so that all waiting nodes take part in the next one."""
        if self.current.is_finishing:
            return NOTHING
        self.current.came += self.current.joining
        came = ", ".join(self.current.came)
        return self._stop(f"{came} joined", Ending.ADMIT) if came else NOTHING

    def _wake_by(self, at: float) -> None:
        self.wake_at = at if self.wake_at is None else min(self.wake_at, at)

    def _delay(self, came: str, pause_s: float, now: float) -> JobDecision:
        self._wake_by(now + pause_s)
        text = f"{came}, and waits for {pause_s:.0f} s: {self._flapping.text}"
        notices = () if self._flapping.is_reported else (Notice(text),)
        self._flapping.is_reported = True
        return Decision(notices, text)

    def _stop(self, because: str, ending: Ending = Ending.TERMINATE) -> JobDecision:
        if self.stage is not JobStage.RUNNING:
            return NOTHING
        self.wake_at = None
        self._move(JobStage.STOPPING)
        self._stop_order = Stop(round=self.round, because=because, ending=ending)
        return Decision((self._stop_order,), because)

    def _finish(
        self, outcome: Outcome, because: str, root: RankFailure | None = None
    ) -> JobDecision:
        self._move(JobStage.DONE)
        self.wake_at = None
        culprit = root.node_rank if root else None
        what = root.text if root else ""
        finish = Finish(outcome=outcome, because=because, culprit=culprit, what=what)
        return Decision((finish,), because)

    def _move(self, to: JobStage) -> None:
        if to not in _MOVES[self.stage]:
            raise RuntimeError(f"a job cannot go from {self.stage.value} to {to.value}")
        self.stage = to
