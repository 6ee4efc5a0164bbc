"""Decides for the whole job: when a round begins, when it must stop, and what comes after it.

    GATHERING --all nodes are here--> RUNNING --a failure, a stop, all ended--> STOPPING
        ^                                                      --all nodes ended--> DONE
        \\--restart, resize-------------------------------------------/

What agents report and `now` go in; orders to all agents and their reason come out. One agent runs
this for all; a job of one machine runs it too. Who takes part is rendezvous/members.py's, and what
comes after a round verdict.py's. No socket, clock or process here.
"""

from __future__ import annotations

from enum import Enum

from rallypoint.base.record import Record
from rallypoint.launch.verdict import Cause, Next, RoundEnd, judge
from rallypoint.rendezvous.members import Gathering, Limits
from rallypoint.rendezvous.round import Member, Seat

NOTICE_EVERY_S = 10.0


# What agents report.


class Broken(Record, kw_only=True):
    """A worker of this node failed: the round cannot succeed any more."""

    node_rank: int
    round: int
    text: str


class Ended(Record, kw_only=True):
    """Nothing of the round is left running on this node, but for what cannot be killed."""

    node_rank: int
    round: int
    succeeded: bool
    causes: tuple[Cause, ...] = ()
    unkillable: int = 0


class StopAsked(Record, kw_only=True):
    """A signal asked this node's agent to stop the job."""

    node_rank: int
    text: str


class Leave(Record, kw_only=True):
    """This node's agent takes part no more, and its workers with it; the job goes on."""

    text: str


Report = Broken | Ended | StopAsked | Leave


# What they are told.


class Outcome(Enum):
    """How a job ends."""

    SUCCEEDED = "succeeded"
    STOPPED = "stopped"
    GIVEN_UP = "given up"


class Start(Record, kw_only=True):
    """Start the workers of this seat in a round; `because` says why there is a new round."""

    seat: Seat
    because: str = ""


class Stop(Record, kw_only=True):
    """End the workers of this round."""

    round: int
    because: str


class Finish(Record, kw_only=True):
    """The job is over. `what` went wrong first is told in full by the node `culprit`, if any."""

    outcome: Outcome
    because: str
    culprit: int | None = None
    what: str = ""


Order = Start | Stop | Finish


class OpenRound(Record, kw_only=True):
    """Open an empty worker store, and order all members to start."""

    number: int
    members: tuple[Member, ...]
    because: str


class Notice(Record):
    """Tell the user why nothing happens."""

    text: str


class Refuse(Record):
    """Tell an agent that it cannot take part."""

    key: str
    why: str


Action = OpenRound | Stop | Finish | Notice | Refuse


class Decision(Record):
    """What to do now, and why; without a reason, nothing has changed."""

    actions: tuple[Action, ...] = ()
    reason: str = ""


NOTHING = Decision()


# The machine.


class Stage(Enum):
    """Where the job stands."""

    GATHERING = "gathering"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"


_MOVES: dict[Stage, tuple[Stage, ...]] = {
    Stage.GATHERING: (Stage.RUNNING, Stage.DONE),
    Stage.RUNNING: (Stage.STOPPING, Stage.GATHERING, Stage.DONE),
    Stage.STOPPING: (Stage.GATHERING, Stage.DONE),
    Stage.DONE: (),
}


class Coordinator:
    """The job. Each method takes one event and gives one `Decision`.

    Members come and go by their keys, and that is free; only failures are charged.
    """

    def __init__(self, limits: Limits, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.stage = Stage.GATHERING
        self.round = -1
        self.restarts = 0
        self.wake_at: float | None = None
        self.members: tuple[Member, ...] = ()  # of the round, also those who are gone
        self._ranks: dict[str, int] = {}  # theirs, by key
        self._running: set[str] = set()  # who is here and has not reported the round's end
        self._gathering = Gathering(limits)
        self._ends: dict[str, Ended] = {}  # of the round, by key
        self._lost: list[str] = []  # hosts, since the round began
        self._came: list[str] = []
        self._stop_asked = ""
        self._because = ""  # why there is to be a new round
        self._notice_at = 0.0

    def opened(self, now: float) -> Decision:
        """Nodes may join from now on."""
        self._gathering.open(now)
        self._notice_at = now + NOTICE_EVERY_S
        self._set_alarm()
        return NOTHING

    def joined(self, member: Member, now: float, last_round: int = -1) -> Decision:
        """A node's agent is here; it knows of rounds up to that one."""
        if self.stage is Stage.DONE:
            return Decision(
                (Refuse(member.key, "the job is over"),), f"{member.host} came too late"
            )
        if member.key in self._gathering.here:
            return NOTHING
        refusal = self._gathering.join(member, now)
        if refusal:
            return Decision((Refuse(member.key, refusal),), f"{member.host} was refused: {refusal}")
        if self.stage is Stage.GATHERING:
            self.round = max(self.round, last_round)
        came = f"{member.host} joined"
        match self.stage:
            case Stage.GATHERING:
                return self._open_if_complete(now, otherwise=Decision((), came))
            case Stage.RUNNING if self._has_room():
                self._came.append(member.host)
                return self._stop(came)
        return Decision((), f"{came}, and waits for the next round")

    def reported(self, key: str, report: Report, now: float) -> Decision:
        """A member's agent reports."""
        match report:
            case Broken(round=self.round):
                return self._stop(report.text)
            case Leave(text=text):
                return self.node_lost(key, text, now)
            case StopAsked():
                self._stop_asked = self._stop_asked or report.text
                if self.stage is Stage.GATHERING:
                    return self._finish(Outcome.STOPPED, report.text)
                return self._stop(report.text)
            case Ended(round=self.round) if self._expects(key):
                self._ends[key] = report
                self._running.discard(key)
                stopped = NOTHING if report.succeeded else self._stop(_first_words(report))
                return _both(stopped, self._judge_if_all_ended(now))
        return NOTHING

    def node_lost(self, key: str, why: str, now: float) -> Decision:
        """A member's agent is gone, and its workers with it."""
        member = self._gathering.leave(key)
        self._running.discard(key)
        if self.stage is Stage.DONE or member is None:
            return NOTHING
        name = self._name(member)
        if self.stage is Stage.GATHERING:
            return Decision((), f"{name} left before the start: {why}")
        if not self._is_in_round(key):
            return Decision((), f"{name}, which waited for the next round, left: {why}")
        end = self._ends.get(key)
        if end is not None and end.succeeded:  # it is only missed if there is another round
            return Decision((), f"{name} left after its workers had succeeded: {why}")
        self._ends.pop(key, None)
        self._lost.append(name)
        return _both(self._stop(f"{name} was lost: {why}"), self._judge_if_all_ended(now))

    def tick(self, now: float) -> Decision:
        """Time has passed."""
        if self.stage is not Stage.GATHERING or self.wake_at is None or now < self.wake_at:
            return NOTHING
        if self._gathering.is_complete(now):
            return self._open_if_complete(now, otherwise=NOTHING)
        text = self._gathering.text()
        if self._gathering.is_over(now):
            waited_s = self._gathering.limits.join_timeout_s
            told = f"{text}, after {waited_s:g} s; start it there, or look why it ended"
            return self._finish(Outcome.GIVEN_UP, told)
        notice = NOTHING
        if now >= self._notice_at:
            self._notice_at = now + NOTICE_EVERY_S
            notice = Decision((Notice(text),), "")
        self._set_alarm()
        return notice

    def _set_alarm(self) -> None:
        alarm = self._gathering.wake_at
        self.wake_at = self._notice_at if alarm is None else min(alarm, self._notice_at)

    def _has_room(self) -> bool:
        return len(self.members) - len(self._lost) < self._gathering.limits.max_nodes

    def _is_in_round(self, key: str) -> bool:
        return key in self._ranks

    def _expects(self, key: str) -> bool:
        return self.stage in (Stage.RUNNING, Stage.STOPPING) and self._is_in_round(key)

    def _judge_if_all_ended(self, now: float) -> Decision:
        if self._running:
            return NOTHING
        here = self._gathering.here
        ends = list(self._ends.values())
        gone = [m for m in self.members if m.key not in here and m.key in self._ends]
        names = [self._name(member) for member in gone]
        facts = RoundEnd(
            succeeded=not self._lost and all(end.succeeded for end in ends),
            causes=tuple(cause for end in ends for cause in end.causes),
            restarts_used=self.restarts,
            max_restarts=self.max_restarts,
            stop_asked=self._stop_asked,
            nodes_left=len(here),
            nodes_lost=(*self._lost, *names),
            nodes_came=tuple(self._came),
            min_nodes=self._gathering.limits.min_nodes,
            is_fixed=self._gathering.limits.is_fixed,
            unkillable=sum(end.unkillable for end in ends),
        )
        verdict = judge(facts)
        match verdict.next:
            case Next.SUCCEED:
                return self._finish(Outcome.SUCCEEDED, verdict.reason)
            case Next.STOP:
                return self._finish(Outcome.STOPPED, verdict.reason)
            case Next.GIVE_UP:
                return self._finish(Outcome.GIVEN_UP, verdict.reason, facts.root)
            case Next.RESTART:
                self.restarts += 1
        self._move(Stage.GATHERING)
        self._because = verdict.reason
        self.opened(now)
        notice = Notice(f"{verdict.reason}: {self._gathering.text()}")
        return self._open_if_complete(now, otherwise=Decision((notice,), verdict.reason))

    def _open_if_complete(self, now: float, *, otherwise: Decision) -> Decision:
        if not self._gathering.is_complete(now):
            self._set_alarm()
            return otherwise
        because, self._because = self._because, ""
        self._move(Stage.RUNNING)
        self.wake_at = None
        self.round += 1
        self.members = self._gathering.form(self.members)
        self._ranks = {member.key: member.node_rank for member in self.members}
        self._running = set(self._ranks)
        self._ends, self._lost, self._came = {}, [], []
        action = OpenRound(number=self.round, members=self.members, because=because)
        return Decision((action,), because or f"{len(self.members)} nodes are here")

    def _stop(self, because: str) -> Decision:
        if self.stage is not Stage.RUNNING:
            return NOTHING
        self._move(Stage.STOPPING)
        return Decision((Stop(round=self.round, because=because),), because)

    def _finish(self, outcome: Outcome, because: str, root: Cause | None = None) -> Decision:
        self._move(Stage.DONE)
        self.wake_at = None
        culprit = root.node_rank if root else None
        what = root.text if root else ""
        finish = Finish(outcome=outcome, because=because, culprit=culprit, what=what)
        return Decision((finish,), because)

    def _name(self, member: Member) -> str:
        """``"node 1 (host7)"``; without the rank if it has none."""
        rank = self._ranks.get(member.key)
        return member.host if rank is None else f"node {rank} ({member.host})"

    def _move(self, to: Stage) -> None:
        if to not in _MOVES[self.stage]:
            raise RuntimeError(f"a job cannot go from {self.stage.value} to {to.value}")
        self.stage = to


def _both(first: Decision, second: Decision) -> Decision:
    reasons = [text for text in (first.reason, second.reason) if text]
    return Decision(first.actions + second.actions, "; ".join(reasons))


def _first_words(end: Ended) -> str:
    return end.causes[0].text if end.causes else f"node {end.node_rank} ended early"
