"""An agent that does not coordinate: as a member, and while it has no coordinator.

A member's heartbeat has the complete state of its node, so nothing is lost with a message or
a coordinator. Workers run only within a lease. When it expires (`Follower.tick`), those that can go
on in the next round are paused until it begins, and the others ended. Each confirmed heartbeat
renews it, counted from when it was *sent*: the coordinator, which counts from when it was received,
always waits longer.

    lost, or just started --- its turn ---> asks, or campaigns --- again, ever later ---> gives up

The heirs, the agents that may coordinate next (register.py), take turns in their order; pauses grow
and differ, so that rivals seldom collide. participant.py decides whether an agent may campaign at
all, and what a won campaign means.
"""

from __future__ import annotations

from random import Random

from rallypoint.rendezvous.consensus.ballot import Campaign
from rallypoint.rendezvous.consensus.messages import (
    NO_BALLOT,
    Ack,
    Action,
    Ballot,
    Call,
    Go,
    Halt,
    Heartbeat,
    Led,
    Promise,
    SendMessage,
)
from rallypoint.rendezvous.consensus.peers import EndedAgents
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL
from rallypoint.rendezvous.job.coordinator import next_notice
from rallypoint.rendezvous.job.reports import (
    Ending,
    Finish,
    Join,
    NodeReport,
    Notice,
    Outcome,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Member, Seat

_STAGGER_S = 0.05  # between candidates, in the order of the members
_RETRY_S = 0.2  # doubled up to a heartbeat
_SEEK_S = 0.5
_FIRST_PAUSE_S = 0.02  # doubled up to that: when nodes start together, some find no other yet
_HOPELESS = 3  # tries
_ASK = 3  # voters at a time: thousands may search at once, and each voter would be asked by all
_NEVER = float("-inf")


class Follower:
    """This agent's part as a member.

    Attributes:
        ballot: whose coordinator it follows; its `leader`, where known.
        round: the round that runs here; -1: none.
        last_round: the latest one that ran here, or should have; -1: none.
        has_run: whether a round ever began here.
        heard_at: when it last heard its coordinator.
        waiting: how many nodes wait for the next round, as the coordinator last reported.
        is_stopping: whether the latest round is being ended, on whichever nodes; as reported.
        voters: which agents to ask if the coordinator is lost.
        beat_at, heartbeat_s: the time of the next heartbeat, and the interval.
        leaving: why this agent was asked to end; empty: it was not.
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
        self.heartbeat_s = register.setup.timeouts.heartbeat_s
        self.leaving = ""
        self._setup, self._rules, self._register = register.setup, register.rules, register
        self._lease_until = _NEVER
        self._stamp: float | None = None
        self._workers = NodeReport()  # the latest of this node's agent
        self._paused_round = -1
        self._cut_off_round = -1
        self._was_cut_off = False  # those of the latest round
        self._is_of_other_job = False  # that round
        self._is_alone = False
        self._done: tuple[str, ...] = ()
        self._done_number = -1

    # The agent that it follows.

    def follow(self, ballot: Ballot, leader: Member | None, now: float) -> None:
        """A coordinator announced that it is ours."""
        if ballot != self.ballot:
            self.ballot, self.leader = ballot, leader
            self._stamp = None
            self.beat_at = now
        self.leader = leader or self.leader
        self.heard_at = now
        self.beat_at = min(self.beat_at, now + self.heartbeat_s)
        self._register.voter.heard(ballot, now)

    def leave_job(self) -> None:
        """Forget the job that it followed.

        How its rounds ended says nothing about those of the next job, except that their numbers are
        taken here.
        """
        self.ballot, self.leader = NO_BALLOT, None
        self._is_of_other_job = True

    def led(self, message: Led, now: float) -> None:
        """Our coordinator reports the state of the job."""
        self._register.voter.decided_in(message.ballot, message.number)
        self._stamp = message.stamp if message.stamp is not None else self._stamp
        self.beat_at = now

    def acknowledged(self, message: Ack, now: float) -> None:
        """Our coordinator has received a heartbeat."""
        self._register.voter.decided_in(message.ballot, message.number)
        if message.lease_s > 0:
            self._lease_until = max(self._lease_until, self._until(message, now))
        self._stamp = message.stamp
        self.waiting, self.is_stopping = message.waiting, message.is_stopping
        self._done, self._done_number = message.done, message.number

    def _until(self, message: Ack | Go, now: float) -> float:
        """When a lease ends: no coordinator can extend it beyond the fence."""
        return min(message.sent_at, now) + min(message.lease_s, self._setup.fence_s)

    def done_in(self, number: int) -> tuple[str, ...]:
        """The members that may have ended early in that agreement's round, as last reported."""
        return self._done if number == self._done_number else ()

    # Orders.

    def refusal(self, seat: Seat) -> str:
        """Why this node does not take a seat: what is wrong with the order, and whose it is."""
        size, most = self._setup.me.local_world_size, self._setup.limits.max_nodes
        if seat.local_world_size > size:
            wrong = f"{seat.local_world_size} ranks on this node, which has {size}"
        elif seat.nodes > most:
            wrong = f"a round of {seat.nodes} nodes in a job of at most {most}"
        else:
            return ""
        host = "" if self.leader is None else f" on {self.leader.host}"
        return (
            f"the coordinator{host} ({self.ballot.candidate}) ordered {wrong}; install the same "
            "version of rallypoint on all nodes"
        )

    def go(self, message: Go, now: float) -> list[Action]:
        """Start, unless the order is too old."""
        if message.start.seat.number <= self.last_round:
            return []
        self.voters = message.voters
        if self.round >= 0:  # the end of the previous round cannot be far
            return [Stop(round=self.round, because="a newer round has begun", ending=Ending.KILL)]
        lease_until = self._until(message, now)
        if self._rules.must_fence(now, lease_until):
            return []  # if it is still valid, it comes again after the next heartbeat
        if self._workers.waits and not message.start.keeps:  # end it, and then begin
            if message.start.seat.local_world_size:
                return self.cut_off("no node is left, and all start over")
            if self._workers.survivors:
                return self.cut_off("others have continued without this node")
        self.beat_at = now
        self._lease_until = max(self._lease_until, lease_until)
        self.round = self.last_round = message.start.seat.number
        self._was_cut_off = self._is_of_other_job = False
        self.has_run = True
        self._is_alone = message.start.seat.nodes == 1
        self.heartbeat_s = self._setup.timeouts.heartbeat_of(message.start.seat.nodes)
        self._register.voter.decided_in(message.ballot, message.number)
        return [message.start]

    def halt(self, message: Halt, now: float) -> list[Action]:
        """End a round; one that has not begun here never will."""
        stop = message.stop
        if stop.round == self.round:
            return [stop]
        if stop.round > self.last_round:
            self.last_round, self.beat_at = stop.round, now
        return []

    def cut_off(self, because: str) -> list[Action]:
        """End what runs at once: others may soon run instead."""
        running = self._running
        if running < 0 or self._cut_off_round == running:
            return []
        self._cut_off_round = running
        return [Stop(round=running, because=because, ending=Ending.KILL)]

    def pause(self, because: str) -> list[Action]:
        """Let nothing run until another round begins here: if others continue, it ends then."""
        if not self._runs:
            return []
        self._paused_round = self._running
        return [Stop(round=self._running, because=because, ending=Ending.PAUSE)]

    @property
    def _runs(self) -> bool:
        """Whether ranks run here that are neither paused nor being ended.

        Workers on standby have no rank, so they may run without a lease.
        """
        has_ranks = self.round >= 0 or self._workers.survivors > 0
        return has_ranks and self._running not in (-1, self._cut_off_round, self._paused_round)

    @property
    def _running(self) -> int:
        """The round of the workers that run here; -1: none."""
        return self._workers.round if self.round < 0 and self._workers.waits else self.round

    # What it reports.

    def reported(self, report: NodeReport, now: float) -> None:
        """The complete state of this node's workers, and its requests."""
        if report.is_over and report.round == self.round:
            self.round = -1
            was_stopped = report.round in (self._cut_off_round, self._paused_round)
            self._was_cut_off = was_stopped and not report.succeeded
        self.leaving = self.leaving or report.leaves or report.stop_asked
        self._workers = report
        self.beat_at = now

    @property
    def _report(self) -> NodeReport:
        """What the coordinator is to know."""
        newest, runs = self._workers, self.round >= 0
        if self._is_of_other_job:
            cut_off = newest.without(self.last_round).__replace__(survivors=0, ready=0)
            return cut_off.__replace__(is_over=not runs, was_cut_off=True)
        if runs and newest.round != self.round:  # this node's agent has yet to begin it
            new = newest.without(self.round).__replace__(survivors=0, ready=0)
            return new.__replace__(has_begun=True, is_over=False)
        if newest.round != self.last_round:
            return newest.without(self.last_round)
        if self._was_cut_off and not runs:
            return newest.__replace__(was_cut_off=True, causes=())
        return newest

    def heartbeat(self, now: float) -> Heartbeat:
        """The heartbeat for the coordinator."""
        unheard_s = now - self.heard_at
        self.beat_at = now + self._rules.heartbeat_after_s(self.heartbeat_s, unheard_s=unheard_s)
        return Heartbeat(
            key=self._setup.me.key,
            ballot=self.ballot,
            sent_at=now,
            stamp=self._stamp,
            number=self._register.voter.number,
            report=self._report,
        )

    def join(self) -> Join:
        """The request to be admitted, for any agent that can do so."""
        setup = self._setup
        return Join(
            run_id=setup.run_id,
            attempt=setup.attempt,
            report=self._report,
            min_nodes=setup.limits.min_nodes,
            max_nodes=setup.limits.max_nodes,
            member=setup.me,
            job=self._register.voter.job,
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
        return self.pause(f"no message from the coordinator for {self._setup.fence_s:g} s")


class Search:
    """From the loss of one coordinator until the next one is heard.

    Attributes:
        campaign: this agent's own, if it has begun one.
        act_at: when to ask or campaign again; None: not before a message comes.
        why: what went wrong last.
    """

    def __init__(
        self, register: Register, follower: Follower, random: Random, gone: EndedAgents
    ) -> None:
        self.campaign: Campaign | None = None
        self.act_at: float | None = None
        self.why = "no node has answered yet"
        self._setup, self._register, self._follower = register.setup, register, follower
        self._random, self._gone = random, gone
        self._term = 0  # the highest one seen
        self._tries = 0
        self._pause_s = _FIRST_PAUSE_S
        self._since = 0.0
        self._notice_at = 0.0

    def begin(self, now: float) -> None:
        """There is no coordinator from now on."""
        self.campaign = None
        self._since, self._notice_at = now, next_notice(now, now)
        self._tries, self._pause_s = 0, _FIRST_PAUSE_S

    def begin_again(self, now: float) -> None:
        """For another job."""
        self.campaign = None
        self._since = self.act_at = now

    @property
    def wake_at(self) -> float:
        """When something is due at the latest."""
        over_at = min(self._notice_at, self._since + self._setup.timeouts.join_timeout_s)
        return over_at if self.act_at is None else min(over_at, self.act_at)

    # What it says.

    def end(self, now: float) -> Finish | None:
        """Whether it gives up."""
        waited_s = now - self._since
        if waited_s < self._setup.timeouts.join_timeout_s:
            return None
        because = f"{self._text()}, after {waited_s:.0f} s"
        return Finish(outcome=Outcome.GIVEN_UP, because=because)

    def notice(self, now: float) -> list[Action]:
        """A message for the user, from time to time."""
        if now < self._notice_at:
            return []
        self._notice_at = next_notice(self._since, now)
        return [Notice(f"waiting for {now - self._since:.0f} s so far: {self._text()}")]

    def _text(self) -> str:
        text = "" if self.campaign is None else self.campaign.text()
        return text or f"no coordinator found ({self.why})"

    # What it does.

    def is_due(self, now: float) -> bool:
        """Whether to ask or campaign now."""
        return self.act_at is not None and now >= self.act_at

    def saw(self, ballot: Ballot) -> None:
        """That campaign was begun."""
        self._term = max(self._term, ballot.term)

    def take_turn(self, now: float, *, was_leading: bool) -> None:
        """Campaign once those before us in the list have had their chance.

        No agent promises before the last coordinator's lease is over, unless it has ended; an agent
        that has just failed to coordinate lets others try first.
        """
        keys = [heir.key for heir in self._register.heirs(self._follower.voters)]
        before = keys[: keys.index(self._setup.me.key)] if self._setup.me.key in keys else []
        count = sum(key not in self._gone for key in before)
        was_lost = self._register.voter.was_lost
        wait_s = 0.0 if was_lost else self._setup.fence_s * self._setup.drift
        turn_s = wait_s + count * _STAGGER_S + self._random.uniform(0, _STAGGER_S / 5)
        self.act_at = now + turn_s + (_RETRY_S if was_leading else 0.0)

    def ask(self) -> list[Action]:
        """Ask any agent that may know of a coordinator."""
        join = self._follower.join()
        asked: list[Action] = [Call(at=at, message=join) for at in self._setup.to_call]
        me, gone = self._setup.me.key, self._gone
        others = [each for each in self._follower.voters if each.key != me and each.key not in gone]
        for voter in self._random.sample(others, min(len(others), _ASK)):
            asked.append(SendMessage(to=voter.key, at=voter.endpoint, message=join))
        return asked

    def unreachable(self, at: Endpoint, why: str, now: float, *, is_seeking: bool) -> None:
        """No agent is there, at least not yet."""
        self.why = f"{at}: {why}"
        if is_seeking and self.act_at is not None:
            self.act_at = min(self.act_at, now + self._pause_s)
            self._pause_s = min(2 * self._pause_s, _SEEK_S)

    def act(self, now: float, *, is_candidate: bool) -> list[Action]:
        """Ask or, as a candidate, campaign."""
        if not is_candidate:
            self.act_at = now + _SEEK_S
            return self.ask()
        self._tries += 1
        term = max(self._term, self._register.voter.promised.term) + 1
        self.campaign = self._register.claim(Ballot(term, self._setup.me.key), now)
        wait_s = min(_RETRY_S * 2**self._tries, self._setup.timeouts.heartbeat_s)
        self.act_at = now + wait_s * self._random.uniform(1, 2)
        asked = self.campaign.ask()
        if self._tries > _HOPELESS:  # there may be another job, or this one may continue without us
            asked += self.ask()
        return asked

    def promised(self, message: Promise, now: float) -> list[Action]:
        """A voter promises in our campaign."""
        campaign = self.campaign
        if campaign is None:
            return []
        campaign.promised(message, now)
        if campaign.won_at is None:
            return []
        if campaign.is_trial:
            self.saw(campaign.ballot)
            return campaign.in_earnest()
        self.act_at = now
        if campaign.decided.number == BEFORE_ALL and not campaign.is_unanimous:
            # The agents that begin a job together are its first voters: more of them are better.
            self.act_at = campaign.won_at + self._setup.timeouts.heartbeat_s
        return []

    def won(self, now: float) -> Campaign | None:
        """Our campaign, if it is won and no further vote can come."""
        campaign = self.campaign
        is_won = campaign is not None and campaign.won_at is not None and not campaign.is_trial
        return campaign if is_won and self.is_due(now) else None

    def pause_as_candidate(self, now: float) -> None:
        """The pause before it campaigns among others than those that it asked."""
        self.campaign = None
        self.act_at = now
        if not self._register.keeper_key:
            self.act_at += self._random.uniform(0, _RETRY_S)
