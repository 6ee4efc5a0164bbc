"""One agent's part in a job of several nodes: facts and `now` in, actions out.

    SEEKING ---an endpoint answers---------> FOLLOWING ---its coordinator is lost--> CAMPAIGNING
       |  ^                                      ^   (only voters; others: SEEKING)     |   |
       |  +--no coordinator, no vote-------------+----------another one won-------------+   |
       +--at the endpoint, or has a vote--> CAMPAIGNING    LEADING <---a quorum promised----+
    any of them ---the job is over, or this agent left---> DONE

register.py: who leads, and what was agreed. rules.py: what each may do. leader.py, follower.py:
this agent's part with its own ballot, and with another's or none. job/coordinator.py: the job
itself. No socket, clock or process here.
"""

from __future__ import annotations

from enum import Enum
from math import inf
from random import Random

from rallypoint.rendezvous.consensus.ballot import Campaign
from rallypoint.rendezvous.consensus.follower import Follower, Search
from rallypoint.rendezvous.consensus.leader import Leader
from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Ack,
    Action,
    Agreement,
    Ballot,
    Go,
    Halt,
    Heartbeat,
    Led,
    Message,
    Outbox,
    Over,
    Prepare,
    Promise,
    Propose,
    Refused,
    Unknown,
)
from rallypoint.rendezvous.consensus.peers import EndedAgents
from rallypoint.rendezvous.consensus.register import OwnStore, Register, Voter
from rallypoint.rendezvous.job.gathering import shorten
from rallypoint.rendezvous.job.reports import (
    Decision,
    Finish,
    Join,
    NodeReport,
    Notice,
    Outcome,
    Refuse,
)
from rallypoint.rendezvous.job.round import Endpoint, Member


class Part(Enum):
    """What the agent does for the agreement."""

    SEEKING = "seeking"
    FOLLOWING = "following"
    CAMPAIGNING = "campaigning"
    LEADING = "leading"
    DONE = "done"


_MOVES: dict[Part, tuple[Part, ...]] = {
    Part.SEEKING: (Part.FOLLOWING, Part.CAMPAIGNING, Part.DONE),
    Part.FOLLOWING: (Part.SEEKING, Part.CAMPAIGNING, Part.DONE),
    Part.CAMPAIGNING: (Part.SEEKING, Part.FOLLOWING, Part.LEADING, Part.DONE),
    Part.LEADING: (Part.SEEKING, Part.FOLLOWING, Part.CAMPAIGNING, Part.DONE),
    Part.DONE: (),
}


class Participant:
    """One agent. Each method takes one event and returns one `Decision`.

    Attributes:
        part: its current role.
        follower: what it knows as a member: the round that runs here, and how long it may.
        register: where it claims to coordinate, with its own vote.
    """

    def __init__(self, register: Register, random: Random) -> None:
        self.part = Part.SEEKING
        self.setup = register.setup
        self.register = register
        self.follower = Follower(register)
        self._key = self.setup.me.key
        self._leader: Leader | None = None
        self._gone = EndedAgents()
        self._search = Search(register, self.follower, random, self._gone)
        self._store = OwnStore(self._key)
        self._keeper_asked_at = -inf
        self._out = Outbox(self._key)

    @property
    def missing(self) -> str:
        """Which nodes are present and missing, if this agent coordinates and gathers."""
        return "" if self._leader is None else self._leader.missing

    @property
    def wake_at(self) -> float | None:
        """When to call `tick` at the latest; None: only events matter."""
        if self.part is Part.DONE:
            return None
        follower, fence_at = self.follower, self.fence_at
        alarms = [follower.beat_at if self._has_leader() else self._search.wake_at]
        if fence_at is not None:
            alarms.append(fence_at)
        if self.part is Part.FOLLOWING:
            alarms += [follower.heard_at + self.setup.fence_s, self._ask_keeper_at]
        if self._leader is not None:
            alarms.append(self._leader.wake_at)
        return min(alarms)

    @property
    def fence_at(self) -> float | None:
        """When workers must end without further messages; None: there are none to end."""
        return self.follower.fence_at

    @property
    def leader_key(self) -> str:
        """The coordinator's key; empty: none is known here."""
        return self.follower.ballot.candidate if self._has_leader() else ""

    def led_members(self, now: float) -> list[tuple[Member, float]]:
        """The members and the time since each was heard, if this agent coordinates."""
        return [] if self._leader is None else self._leader.members(now)

    @property
    def agreement(self) -> Agreement | None:
        """The latest one that this agent knows to be decided."""
        return self._voter.decided if self._leader is None else self._leader.agreement

    @property
    def job(self) -> str:
        """The key of the agent that began the job of this agent, or one that it knows of."""
        return self._voter.job

    @property
    def has_part(self) -> bool:
        """Whether it has voted, or knows what was agreed; otherwise it only knows of a job."""
        return self._voter.decided is not None or self._voter.accepted is not None

    # Events.

    def started(self, now: float) -> Decision[Action]:
        """The driver listens: look for the others."""
        self._search.begin(now)
        if self.register.may_claim():
            self._move(Part.CAMPAIGNING)
            slot = self.setup.slot or 0
            self._search.act_at = now + slot * 2 * self.setup.timeouts.heartbeat_s
            if slot:
                self._out.add(self._search.ask())
        else:
            self._search.act_at = now
        return self._decide(now)

    def received(self, sender: str, message: Message, now: float) -> Decision[Action]:
        """A message of the agent with that key; drivers have checked key and token."""
        self._take(sender, message, now)
        return self._decide(now)

    def closed(self, key: str, why: str, now: float) -> Decision[Action]:
        """That agent has ended: its connection closed, or another one answers at its address.

        Do not call this for a connection that could not be made, or only fell silent.
        """
        self._gone.add(key)
        self._voter.lost(key)
        if self._leader is not None:
            self._leader.closed(key, why, now)
        elif key == self.follower.ballot.candidate and self.part is Part.FOLLOWING:
            self._lose(f"the coordinator was lost: {why}", now)
        return self._decide(now)

    def unreachable(self, at: Endpoint, why: str, now: float) -> Decision[Action]:
        """A `Call` reached no agent."""
        self._search.unreachable(at, why, now, is_seeking=self.part is Part.SEEKING)
        return self._decide(now)

    def reported(self, report: NodeReport, now: float) -> Decision[Action]:
        """The complete state of this node."""
        self.follower.reported(report, now)
        return self._decide(now)

    def store_opened(self, round_number: int, store: Endpoint, now: float) -> Decision[Action]:
        """The store requested with `OpenStore` is open."""
        proposal = self._store.opened(round_number, store)
        if proposal is not None:
            self._answer(proposal, now)
        return self._decide(now)

    def fenced(self, now: float) -> Decision[Action]:
        """Workers are being paused or ended after `fence_at`, whatever this agent knows."""
        self._out.add(self.follower.pause("this node's launcher was held up for too long"))
        return self._decide(now)

    def tick(self, now: float) -> Decision[Action]:
        """Time has passed."""
        return self._decide(now)

    # Consequences of events.

    def _decide(self, now: float) -> Decision[Action]:
        """Do what is due, process messages to itself until there are none; the result."""
        self._run(now)
        while self._out.own and self.part is not Part.DONE:
            self._take(self._key, self._out.own.popleft(), now)
            self._run(now)
        return self._out.take()

    def _run(self, now: float) -> None:
        follower = self.follower
        if self.part is Part.DONE:
            return None
        self._out.add(follower.tick(now))
        leader = self._leader
        if leader is not None:
            if now >= leader.wake_at:
                leader.tick(now)
            self._voter.learn(leader.agreement)
            if leader.finish is not None:
                return self._finish(leader.finish)
            if leader.deposed:
                self._lose(f"no longer coordinates: {leader.deposed}", now)
        elif self.part is Part.FOLLOWING:
            if now >= follower.heard_at + self.setup.fence_s:
                self._lose(f"the coordinator was silent for {self.setup.fence_s:g} s", now)
            elif now >= self._ask_keeper_at:
                self._keeper_asked_at = now
                self._send(self.register.keeper_key, follower.join())
        if not self._has_leader():
            self._search_on(now)
        elif now >= follower.beat_at:
            self._send(follower.ballot.candidate, follower.heartbeat(now))
        return None

    @property
    def _ask_keeper_at(self) -> float:
        """When to ask the keeper which agent coordinates, if the coordinator is not heard until
        then.
        """
        if not self.register.keeper_key:
            return inf
        heartbeat_s = self.setup.timeouts.heartbeat_s
        return max(self._keeper_asked_at, self.follower.heard_at + heartbeat_s) + heartbeat_s

    @property
    def _voter(self) -> Voter:
        return self.register.voter

    # Messages.

    def _take(  # noqa: PLR0912 - one case for each message
        self, sender: str, message: Message, now: float
    ) -> None:
        if self.part is Part.DONE:
            return
        self._gone.discard(sender)  # its connection had been lost, but the agent is alive
        match message:
            case Join() | Heartbeat():
                self._heard_peer(sender, message, now)
            case Accepted():
                if self._leader is not None:
                    self._leader.accepted(message, now)
            case Prepare():
                if not message.is_trial:
                    self._search.saw(message.ballot)
                answer = self._voter.prepare(message, now)
                if isinstance(answer, Refused) and self._has_leader():
                    is_ours = self._leader is not None
                    leader = self.setup.me if is_ours else self.follower.leader
                    answer = answer.__replace__(leader=leader)
                self._send(sender, answer)
            case Promise():
                self._promised(message, now)
            case Refused():
                self._refused(message, now)
            case Propose():
                self._proposed(sender, message, now)
            case Led():
                self._led(sender, message, now)
            case Ack() | Go() | Halt():
                self._ordered(sender, message, now)
            case Over() | Refuse() if not self._may_end(sender):
                return
            case Over(finish=finish):
                if self._leader is None or self._leader.agreement.finish is None:
                    self._finish(finish)
            case Unknown():
                if message.ballot == self.follower.ballot:
                    self._out.add(self.follower.pause("the coordinator does not know this node"))
                    if self.follower.round < 0:
                        self._send(sender, self.follower.join())
            case Refuse(why=why):
                text = f"this node was refused: {why}"
                self._finish(Finish(outcome=Outcome.GIVEN_UP, because=text, was_cut_off=True))
            case Notice():
                self._out.add([message])

    def _may_end(self, sender: str) -> bool:
        """Whether to believe that agent that the job is over, or that this agent has no place in
        it.

        An agent with a coordinator believes that one, the keeper of the register, and members;
        otherwise any agent.
        """
        keeper = self.register.keeper_key or self._key
        if not self._has_leader() or sender in (self._key, self.follower.ballot.candidate, keeper):
            return True
        members = () if self.agreement is None else self.agreement.members
        return any(sender == member.key for member in members)

    def _heard_peer(self, sender: str, message: Join | Heartbeat, now: float) -> None:
        if self._leader is None:
            self._tell_who_leads(sender, now)
        elif isinstance(message, Join):
            self._leader.joined(message, now)
        elif message.ballot == self.follower.ballot:
            self._leader.heartbeat(message, now)
        elif message.ballot.term < self.follower.ballot.term:
            self._tell_who_leads(sender, now)

    def _tell_who_leads(self, key: str, now: float) -> None:
        """Tell that agent about our job and its coordinator, if there are any."""
        led = None
        if self._leader is not None:
            led = self._leader.led(now)
        elif self.part is Part.FOLLOWING:
            led = self.follower.led_by()
        if led is not None and led.host and led.leader.key != key:
            self._send(key, led)

    def _ordered(self, sender: str, message: Ack | Go | Halt, now: float) -> None:
        """A coordinator's message: ours, if no higher ballot is known here."""
        follower = self.follower
        if message.ballot.candidate != sender:
            return
        if message.ballot < self._voter.promised:
            return self._refuse(sender, message.ballot)
        self._follow(message.ballot, None, now)
        if isinstance(message, Ack):
            follower.acknowledged(message, now)
        elif isinstance(message, Go):
            if not self.job:  # the order to start came before the description of the job
                return self._send(sender, self.follower.join())
            refusal = follower.refusal(message.start.seat)
            if refusal:
                given_up = Outcome.GIVEN_UP
                return self._finish(Finish(outcome=given_up, because=refusal, was_cut_off=True))
            self._out.add(follower.go(message, now))
        else:
            self._out.add(follower.halt(message, now))
        return None

    def _led(self, sender: str, message: Led, now: float) -> None:
        if message.leader.key == self._key:
            self.follower.beat_at = now  # it was not known there when it first sent a heartbeat
            return
        if message.leader.key in self._gone:
            return
        is_other_job = self.job not in ("", message.host)
        if is_other_job and not self._join_other_job(sender, message, now):
            self._tell_who_leads(sender, now)  # that one gives way
            return
        self._voter.job_exists(message.host)
        if self._leader is not None and not self.register.may_claim():
            self._leader.deposed = "a job already exists"
        is_by_leader = sender == message.leader.key and message.stamp is not None
        if message.ballot < self._voter.promised:
            if is_by_leader:
                self._refuse(sender, message.ballot)
        elif is_by_leader:
            self._follow(message.ballot, message.leader, now)
            self.follower.led(message, now)
        elif not self._has_leader() or self.follower.ballot < message.ballot:
            self._ask_to_join(message.leader)

    def _follow(self, ballot: Ballot, leader: Member | None, now: float) -> None:
        self._search.saw(ballot)
        self.follower.follow(ballot, leader, now)
        if ballot.candidate != self._key and self.part is not Part.FOLLOWING:
            if self._leader is not None:
                self._out.add((), f"no longer coordinates: term {ballot.term} has a coordinator")
            self._leader = self._search.campaign = None
            self._move(Part.FOLLOWING)

    def _refuse(self, sender: str, ballot: Ballot) -> None:
        self._send(sender, Refused(ballot=ballot, promised=self._voter.promised, job=self.job))

    # Votes.

    def _proposed(self, sender: str, message: Propose, now: float) -> None:
        self._search.saw(message.ballot)
        if message.ballot.candidate == sender:
            self._out.add(self._store.proposed(message, self._voter.number))
            self._answer(message, now)

    def _answer(self, message: Propose, now: float) -> None:
        answer = self._voter.propose(message, now)
        if isinstance(answer, Accepted):
            self._follow(message.ballot, None, now)
            answer = self._store.with_store(answer, message.agreement)
        self._send(message.ballot.candidate, answer)

    def _promised(self, message: Promise, now: float) -> None:
        if not self.register.may_claim():
            return
        self._out.add(self._search.promised(message, now))
        won = self._search.won(now)
        if won is not None:
            self._win(won, now)

    def _win(self, campaign: Campaign, now: float) -> None:
        self._search.campaign = None
        self._move(Part.LEADING)
        self._out.add((), f"coordinates the job in term {campaign.ballot.term}")
        newest = campaign.bound() or campaign.decided
        done = self.follower.done_in(newest.number)
        self._leader = Leader(
            self.register, campaign, gone=self._gone, done=done, out=self._out, now=now
        )
        self._follow(campaign.ballot, self.setup.me, now)

    def _refused(self, message: Refused, now: float) -> None:
        self._search.saw(message.promised)
        if message.decided is not None:
            self._voter.learn(message.decided)
        if self._leader is not None:
            self._leader.refused(message)
        leader, decided, campaign = message.leader, message.decided, self._search.campaign
        is_other = leader is not None and leader.key != self._key and leader.key not in self._gone
        if leader is not None and is_other and not self._has_leader():
            self._ask_to_join(leader)
        if campaign and decided and decided.number > campaign.decided.number:
            self._search.pause_as_candidate(now)  # it asked agents that no longer decide
            if not self.register.may_claim():
                self._move(Part.SEEKING)

    # Without a coordinator.

    def _lose(self, why: str, now: float) -> None:
        self._search.why = why
        was_leading = self._leader is not None
        self._leader = None
        self._search.begin(now)
        is_lost = self.follower.ballot.candidate in self._gone
        if self.setup.quorum == "host" and is_lost and not was_leading:
            because = self.register.rules.why_over(why)
            finish = Finish(outcome=Outcome.GIVEN_UP, because=because, was_cut_off=True)
            return self._finish(finish)
        self._out.add(self._too_few_left(), why)
        if self.register.may_claim():
            self._move(Part.CAMPAIGNING)
            return self._search.take_turn(now, was_leading=was_leading)
        self._move(Part.SEEKING)
        self._search.act_at = now
        return None

    def _too_few_left(self) -> list[Action]:
        """Tell the user at once if no others can continue, as when the first of two is lost."""
        decided, lost = self.agreement, {*self._gone, self.follower.ballot.candidate} - {self._key}
        if decided is None or self.register.keeper_key:
            return []
        voters = self.register.rules.voters(decided)
        left = [each.key for each in voters if each.key not in lost]
        if not voters or self.register.rules.is_quorum(decided, left):
            return []
        missing = shorten([each.host for each in voters if each.key in lost])
        count, wait_s = f"{len(left)} of {len(voters)} nodes", self.setup.timeouts.join_timeout_s
        how_long = f"up to {wait_s:g} s (--rdzv-conf join_timeout=SECONDS)"
        text = f"{count}, too few to continue: waiting for {missing} for {how_long}"
        return [Notice(text)]

    def _search_on(self, now: float) -> None:
        """Seek, or campaign; report it; give up in the end."""
        if self.follower.leaving and self.follower.round < 0:
            finish = Finish(outcome=Outcome.STOPPED, because=self.follower.leaving)
            return self._finish(finish)
        end = self._search.end(now)
        if end is not None:
            return self._finish(end)
        self._out.add(self._search.notice(now))
        if self.part is Part.SEEKING and self.register.may_claim():  # it has a vote by now
            self._move(Part.CAMPAIGNING)
            self._search.take_turn(now, was_leading=False)
        if not self._search.is_due(now):
            return None
        is_candidate = self.part is Part.CAMPAIGNING
        if is_candidate and not self.register.may_claim():
            self._search.campaign = None
            return self._move(Part.SEEKING)
        won = self._search.won(now)
        if won is not None:
            return self._win(won, now)
        return self._out.add(self._search.act(now, is_candidate=is_candidate))

    # Other jobs.

    def _join_other_job(self, sender: str, message: Led, now: float) -> bool:
        """Of two jobs of one name, the more advanced one wins. Whether we give way to it.

        The one that is older has had more coordinators: a second job begins where the first has
        lost its own, at an endpoint whose agent is new.
        """
        round_number = self.follower.last_round if self._leader is None else self._leader.round
        mine = self.follower.ballot.term, round_number, self.job
        must_join = sender == self.follower.ballot.candidate or (
            self.follower.round < 0 and not self._has_leader()
        )
        if not must_join and (message.ballot.term, message.round, message.host) <= mine:
            return False
        self._out.add((), f"joins the job that {message.leader.host} coordinates instead")
        if self._leader is not None:
            for key in self._leader.peers:
                self._send(key, message)
        self._out.add(self.follower.cut_off("another job with that name has made more progress"))
        self._leader = None
        self.register.leave_job()
        self.follower.leave_job()
        self._search.begin_again(now)
        self._move(Part.CAMPAIGNING if self.register.may_claim() else Part.SEEKING)
        return True

    # Sending.

    def _has_leader(self) -> bool:
        return self.part in (Part.FOLLOWING, Part.LEADING)

    def _send(self, key: str, message: Message) -> None:
        leader = self.follower.leader
        at = leader.endpoint if leader is not None and leader.key == key else None
        self._out.send(key, at, message)

    def _ask_to_join(self, leader: Member) -> None:
        self._out.send(leader.key, leader.endpoint, self.follower.join())

    def _finish(self, finish: Finish) -> None:
        if finish.outcome is Outcome.SUCCEEDED and not self.follower.has_run:
            finish = finish.__replace__(outcome=Outcome.MISSED)
        self._move(Part.DONE)
        self._out.add([finish], finish.because)

    def _move(self, to: Part) -> None:
        if to is self.part:
            return
        if to not in _MOVES[self.part]:
            raise RuntimeError(f"an agent cannot go from {self.part.value} to {to.value}")
        self.part = to
