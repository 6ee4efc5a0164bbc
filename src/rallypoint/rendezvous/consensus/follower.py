"""A member's side: its reports, its coordinator's orders, and its lease, whose end stops workers.

Each heartbeat repeats everything important until it is confirmed, so nothing is lost with a message
or a coordinator. Workers run only within a lease. When it expires (`tick`), those that can go on in
the next round are paused until it begins, and the others ended. Each confirmed heartbeat renews it,
counted from when it was *sent*: the coordinator, which counts from when it was received, always
waits longer.
"""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.rendezvous.consensus.messages import (
    NO_BALLOT,
    Ack,
    Action,
    Ballot,
    Beat,
    Go,
    Halt,
    Led,
)
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.job.reports import Ended, Join, Leave, Report, Stop, StopAsked
from rallypoint.rendezvous.job.round import Member

_NEVER = float("-inf")


class Follower:
    """This agent's part as a member.

    Attributes:
        ballot: whose coordinator it follows; its `leader`, where known.
        round: the round that runs here; -1: none.
        has_run: whether a round ever began here.
        heard_at: when it last heard its coordinator.
        waiting, is_stopping: as the coordinator last reported.
        voters: whom to ask if the coordinator is lost.
        beat_at, beat_s: the time of the next heartbeat, and the interval.
    """

    def __init__(self, register: Register) -> None:
        self.ballot: Ballot = NO_BALLOT
        self.leader: Member | None = None
        self.round = -1
        self.last_round = -1
        self.has_run = False
        self.heard_at = _NEVER
        self.waiting = 0
        self.is_stopping = False
        self.voters: tuple[Member, ...] = ()
        self.beat_at = _NEVER
        self.beat_s = register.setup.timeouts.beat_s
        self.is_leaving = ""
        self._setup, self._rules, self._register = register.setup, register.rules, register
        self._lease_until = _NEVER
        self._stamp: float | None = None
        self._reports: list[Report] = []  # of the latest round, and for the whole job
        self._first = 0  # the number of the first report
        self._seen = 0
        self._paused_round = -1
        self._cut_off_round = -1
        # The end of a round whose survivors, or workers on standby, wait for the next.
        self._kept: Ended | None = None
        self._has_place = True  # in the latest round
        self._is_alone = False
        self._done: tuple[str, ...] = ()
        self._done_number = -1

    # Whom it follows.

    def follow(self, ballot: Ballot, leader: Member | None, now: float) -> None:
        """A coordinator announced that it is ours."""
        if ballot != self.ballot:
            self.ballot, self.leader = ballot, leader
            self._stamp, self._seen = None, self._first
            self.beat_at = now
        self.leader = leader or self.leader
        self.heard_at = now
        self.beat_at = min(self.beat_at, now + self.beat_s)
        self._register.voter.heard(ballot, now)

    def leave_job(self) -> None:
        """Forget the job that it followed.

        How its rounds ended says nothing about those of the next job, except that their numbers are
        taken here.
        """
        self.ballot, self.leader = NO_BALLOT, None
        self._keep(
            each.__replace__(succeeded=False, was_cut_off=True, causes=(), survivors=0, ready=0)
            if isinstance(each, Ended)
            else each
            for each in self._reports
            if isinstance(each, Ended | Leave | StopAsked)
        )

    def led(self, message: Led, now: float) -> None:
        """Our coordinator reports the state of the job."""
        self._register.voter.decided_in(message.ballot, message.number)
        self._stamp = message.stamp if message.stamp is not None else self._stamp
        self.beat_at = now

    def acknowledged(self, message: Ack) -> None:
        """Our coordinator has received a heartbeat."""
        self._register.voter.decided_in(message.ballot, message.number)
        if message.lease_s > 0:
            self._lease_until = max(self._lease_until, message.sent_at + message.lease_s)
        self._stamp = message.stamp
        self._seen = max(self._seen, message.seen)
        self.waiting, self.is_stopping = message.waiting, message.is_stopping
        self._done, self._done_number = message.done, message.number

    def done_in(self, number: int) -> tuple[str, ...]:
        """The members that may have ended early in that agreement's round, as last reported."""
        return self._done if number == self._done_number else ()

    # Orders.

    def go(self, message: Go, now: float) -> list[Action]:
        """Start, unless the order is too old."""
        if message.start.seat.number <= self.last_round:
            return []
        self.voters = message.voters
        if self.round >= 0:  # the end of the previous round cannot be far
            return self._stop(self.round, "a newer round has begun", at_once=True)
        if self._rules.must_fence(now, message.sent_at + message.lease_s):
            return []  # if it is still valid, it comes again after the next beat
        if self._kept is not None and not message.start.keeps:  # end it, and then begin
            if message.start.seat.local_world_size:
                return self.cut_off("nobody is left, and all begin anew")
            if self._kept.survivors:
                return self.cut_off("others have gone on without this node")
        self.beat_at = now
        self._lease_until = max(self._lease_until, message.sent_at + message.lease_s)
        self.round = self.last_round = message.start.seat.number
        self._kept = None
        self.has_run = True
        self._is_alone = message.start.seat.nodes == 1
        self._has_place = message.start.seat.local_world_size > 0
        self.beat_s = self._setup.timeouts.beat_of(message.start.seat.nodes)
        self._register.voter.decided_in(message.ballot, message.number)
        self._drop(message.start.seat.number)
        return [message.start]

    def halt(self, message: Halt, now: float) -> list[Action]:
        """End a round; one that has not begun here never will."""
        stop = message.stop
        if stop.round == self.round:
            return [stop]
        if stop.round > self.last_round:
            self.last_round = stop.round
            self._drop(stop.round)
            end = Ended(node_rank=-1, round=stop.round, succeeded=False)
            if self._kept is not None:
                survivors, ready = self._kept.survivors, self._kept.ready
                end = end.__replace__(survivors=survivors, ready=ready)
            self._tell(end, now)
        return []

    def cut_off(self, because: str) -> list[Action]:
        """End what runs at once: others may soon run instead."""
        running = self._running
        if running < 0 or self._cut_off_round == running:
            return []
        self._cut_off_round = running
        return self._stop(running, because, at_once=True)

    def fenced(self) -> list[Action]:
        """The guardian found the lease over before this agent did."""
        return self._pause("this node's launcher was held up for too long") if self._runs else []

    def _pause(self, because: str) -> list[Action]:
        """Let nothing run until another round begins here."""
        self._paused_round = self._running
        return [Stop(round=self._running, because=because, at_once=True, may_pause=True)]

    @property
    def _runs(self) -> bool:
        """Whether workers run here that are neither paused nor being ended."""
        return self._running not in (-1, self._cut_off_round, self._paused_round)

    @property
    def _running(self) -> int:
        """The round of the workers that run here; -1: none."""
        return self._kept.round if self.round < 0 and self._kept is not None else self.round

    def _stop(self, number: int, because: str, *, at_once: bool = False) -> list[Action]:
        return [Stop(round=number, because=because, at_once=at_once)]

    # What it reports.

    def reported(self, report: Report, now: float) -> None:
        """A report on this node's workers, or a request to it."""
        if isinstance(report, Ended):
            if report.round == self.round:
                self.round = -1
                waits = report.survivors or report.ready or not self._has_place
                self._kept = report if waits else None
            elif self._kept is not None and report.round == self._kept.round:
                self._kept = None  # they have ended after all
            was_stopped = report.round in (self._cut_off_round, self._paused_round)
            if was_stopped and not report.succeeded:
                report = report.__replace__(was_cut_off=True, causes=())
        if isinstance(report, Leave | StopAsked):
            self.is_leaving = self.is_leaving or report.text
        self._tell(report, now)

    def _tell(self, report: Report, now: float) -> None:
        self._reports.append(report)
        self.beat_at = now

    def _drop(self, number: int) -> None:
        """Drop reports of older rounds, except for those that concern the job."""
        self._keep(
            each
            for each in self._reports
            if isinstance(each, Leave | StopAsked) or each.round >= number
        )

    def _keep(self, some: Iterable[Report]) -> None:
        """Of the reports only those."""
        kept = list(some)
        # Numbers only grow, so that a repeated report is not mistaken for a new one, or an old one.
        self._first += len(self._reports) - len(kept)
        self._reports = kept
        self._seen = max(self._seen, self._first)

    def beat(self, now: float) -> Beat:
        """The heartbeat for the coordinator."""
        unheard_s = now - self.heard_at
        self.beat_at = now + self._rules.beat_after_s(self.beat_s, unheard_s=unheard_s)
        return Beat(
            key=self._setup.me.key,
            ballot=self.ballot,
            sent_at=now,
            stamp=self._stamp,
            number=self._register.voter.number,
            round=self.round,
            first=self._seen,
            reports=tuple(self._reports[self._seen - self._first :]),
        )

    def join(self) -> Join:
        """The request to be admitted, for any agent that can do so."""
        setup = self._setup
        return Join(
            run_id=setup.run_id,
            attempt=setup.attempt,
            last_round=self.last_round,
            min_nodes=setup.limits.min_nodes,
            max_nodes=setup.limits.max_nodes,
            member=setup.me,
            job=self._register.voter.job,
            running=self.round,
        )

    def led_by(self) -> Led | None:
        """The coordinator, for agents that ask; None: not known here."""
        if self.leader is None:
            return None
        voter = self._register.voter
        return Led(
            ballot=self.ballot,
            leader=self.leader,
            host=voter.job,
            number=voter.number,
            round=self.last_round,
        )

    # Time.

    @property
    def fence_at(self) -> float | None:
        """When workers must end without further messages; None: there are none to end."""
        if not self._runs or not self._rules.needs_lease(is_alone=self._is_alone):
            return None
        return self._lease_until

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        if self.fence_at is None or not self._rules.must_fence(now, self.fence_at):
            return []
        return self._pause(f"no message from the coordinator for {self._setup.fence_s:g} s")
