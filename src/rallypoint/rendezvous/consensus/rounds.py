"""A job and its coordinator: the decisions of `Coordinator` become agreements and orders.

    members' reports --> Coordinator --OpenRound, Finish----> `wanted`: what is to be agreed next
                                     --Stop, Notice, Refuse-> to members, at once
    the round is agreed, its store is open --> `start`: Go to each member

A heartbeat also shows what a member has missed: it is sent again (`correct`). peers.py knows which
agents are present, leader.py makes agreements.
"""

from __future__ import annotations

from rallypoint.rendezvous.consensus.ballot import Agreements
from rallypoint.rendezvous.consensus.messages import (
    Agreement,
    Ballot,
    Go,
    Halt,
    Heartbeat,
    Outbox,
    Over,
)
from rallypoint.rendezvous.consensus.peers import EndedAgents, Peer, Peers
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL
from rallypoint.rendezvous.job.coordinator import Coordinator, JobDecision, JobStage, OpenRound
from rallypoint.rendezvous.job.reports import (
    NOTHING,
    Finish,
    NodeReport,
    Notice,
    Outcome,
    Refuse,
    Start,
    Stop,
    assert_never,
)
from rallypoint.rendezvous.job.round import Endpoint, Member, seats_of


class Orders:
    """The orders of one ballot: which round members were ordered to start, and what is unconfirmed.

    A start order goes to members that have sent a heartbeat under this ballot, because it is valid
    for a time after that heartbeat; the others get it after their first one. Each order is repeated
    until a heartbeat shows that it was obeyed.

    Attributes:
        round: the latest one that this coordinator has ordered members to start; -1: none.
        old_round: the one that its predecessor may have; -1: none.
    """

    def __init__(self, ballot: Ballot) -> None:
        self.round = -1
        self.old_round = -1
        self._ballot = ballot
        self._orders: dict[str, Go] = {}
        self._sent_at = 0.0  # to all
        self._halt: Halt | None = None
        self._unsent: set[str] = set()  # members whose order waits for their first heartbeat

    def begin(
        self, agreed: Agreement, store: Endpoint, voters: tuple[Member, ...], now: float
    ) -> tuple[str, ...]:
        """That round is agreed; returns the keys of its members."""
        seats = seats_of(agreed.members, number=agreed.round, store=store)
        keep = {member.key for member in agreed.members if member.taking_part > 0}
        self.round, self._sent_at = agreed.round, now
        self._orders = {
            key: Go(
                ballot=self._ballot,
                sent_at=0.0,
                lease_s=0.0,
                number=agreed.number,
                start=Start(
                    seat=seat,
                    because=agreed.because,
                    is_urgent=agreed.is_urgent,
                    may_replace=agreed.may_replace,
                    keeps=key in keep,
                ),
                voters=voters,
            )
            for key, seat in seats.items()
        }
        self._unsent.clear()
        return tuple(self._orders)

    def send(self, key: str, peers: Peers, now: float) -> None:
        """Order that member to start, if it has sent a heartbeat."""
        peer = peers.by_key.get(key)
        if peer is None or peer.sent_at is None:
            self._unsent.add(key)
            return
        self._unsent.discard(key)
        lease_s = peers.lease_s(peer, now)
        peers.send(key, self._orders[key].__replace__(sent_at=peer.sent_at, lease_s=lease_s))

    def must_repeat(self, key: str, now: float, heartbeat_s: float) -> bool:
        """Whether to repeat the order to a member whose heartbeat does not show it."""
        return key in self._unsent or now - self._sent_at > heartbeat_s

    def halt_all(self, stop: Stop, now: float) -> Halt:
        """The order to all members to end the latest round."""
        self._sent_at = now
        return self.halt(stop)

    def halt(self, stop: Stop) -> Halt:
        """The order to one member to end a round; equal orders are the same object."""
        if self._halt is None or self._halt.stop != stop:
            self._halt = Halt(ballot=self._ballot, stop=stop)
        return self._halt


LEFT = Finish(outcome=Outcome.STOPPED, because="this node left; the job continues")


class Rounds:
    """The rounds of one ballot.

    Attributes:
        job: None until the predecessor's proposal is decided.
        wanted: the agreement to ask for next; None: the current one is sufficient.
        done: members whose workers have succeeded, and which may end before the others.
    """

    def __init__(
        self,
        register: Register,
        ballot: Ballot,
        agreements: Agreements,
        peers: Peers,
        gone: EndedAgents,
        out: Outbox,
    ) -> None:
        self.job: Coordinator | None = None
        self.wanted: Agreement | None = None
        self.done: tuple[str, ...] = ()
        self._setup, self._rules = register.setup, register.rules
        self._orders = Orders(ballot)
        self._agreements, self._peers, self._gone, self._out = agreements, peers, gone, out

    def shrunk(self) -> Agreement | None:
        """A list without the lost nodes, so that they are not needed for a quorum any more."""
        if self.job is None or self.job.stage is not JobStage.GATHERING:
            return None
        newest = self._agreements.newest
        left = [each for each in newest.members if each.key not in self._gone]
        if len(left) == len(newest.members) or newest.number == BEFORE_ALL:
            return None
        if not left and self._setup.me.key not in self._gone:
            # An agent that took over without being a member is one from the next round on.
            return None
        if left and not (self._setup.quorum == "host" and newest.host in self._gone):
            return self._follow_up(members=tuple(left), because="some nodes have left")
        because = "the node that started the job left" if left else "the last node left"
        return self._ended(Finish(outcome=Outcome.STOPPED, because=because, was_cut_off=True))

    def _ended(self, finish: Finish) -> Agreement:
        ended = self._follow_up(members=self._agreements.newest.members, because=finish.because)
        return ended.__replace__(finish=finish)

    def _follow_up(self, *, members: tuple[Member, ...], because: str) -> Agreement:
        assert self.job is not None
        return Agreement(
            number=0,
            members=members,
            round=self.job.round,
            restarts=self.job.restarts,
            because=because,
            host=self._agreements.newest.host,
        )

    def resume(self, now: float) -> None:
        """Continue with what is agreed now."""
        held = self._agreements.newest
        if held.finish is not None:
            return
        self.job = Coordinator.resumed(
            self._setup.limits,
            self._setup.max_restarts,
            members=held.members,
            round_number=held.round,
            runs=held.runs,
            restarts=held.restarts,
            now=now,
        )
        self._orders.old_round = held.round if held.runs else -1
        for member in held.members:
            key = member.key
            if key in self.done and held.runs:
                end = NodeReport(round=held.round, has_begun=True, succeeded=True)
                self.perform(self.job.reported(key, end, now), now)
            if key in self._gone:
                self.perform(self.job.node_lost(key, "its connection closed", now), now)
                continue
            report = self._peers.by_key[key].report if key in self._peers.by_key else None
            if report is not None and not held.runs:
                self.perform(self.job.joined(member, now, report), now)
        self.perform(self.job.tick(now), now)

    def perform(self, decision: JobDecision, now: float) -> None:
        """Do what the job has decided, and what follows from it."""
        assert self.job is not None
        while decision != NOTHING:
            decision = self._perform_once(decision, now)
        is_done = self._setup.me.key in self.job.current.succeeded
        self.done = self.job.current.left_succeeded + (self._setup.me.key,) * is_done

    def _perform_once(self, decision: JobDecision, now: float) -> JobDecision:
        """Returns what follows from it at once."""
        self._out.add((), decision.reason)
        left: JobDecision = NOTHING
        for action in decision.actions:
            match action:
                case OpenRound():
                    opened = self._follow_up(members=action.members, because=action.because)
                    self.wanted = opened.__replace__(
                        round=action.number,
                        runs=True,
                        is_urgent=action.is_urgent,
                        may_replace=action.may_replace,
                    )
                case Stop():
                    left += self._halt(action, now)
                case Finish():
                    self.wanted = self._ended(action)
                case Notice():
                    self._peers.send_all(action)
                case Refuse():
                    self._peers.send(action.key, action)
                    self._peers.by_key.pop(action.key, None)
                case _:
                    assert_never(action)
        return left

    def start(self, new: Agreement, store: Endpoint, now: float) -> None:
        """That round is agreed, and its store open: order its members to start."""
        for key in self._orders.begin(new, store, self._rules.heirs(new), now):
            self._orders.send(key, self._peers, now)

    def _halt(self, stop: Stop, now: float) -> JobDecision:
        """Pass it on; returns the next round at once if no member was ordered to start."""
        assert self.job is not None
        if stop.round not in (self._orders.round, self._orders.old_round):
            return self.job.revoked(now)
        self._peers.send_all(self._orders.halt_all(stop, now))
        return NOTHING

    def take_report(self, peer: Peer, heartbeat: Heartbeat, now: float) -> None:
        """Take in a member's heartbeat."""
        job, key = self.job, heartbeat.key
        assert job is not None
        # An agent that only waits for its node rank has no place yet that it could lose.
        was_admitted = key in job.gathering.here or key in self._gone
        self.perform(job.reported(key, heartbeat.report, now), now)
        if key not in job.gathering.here and (was_admitted or heartbeat.report.leaves):
            self._gone.add(key)
            if all(member.key != key for member in self._agreements.newest.members):
                self._peers.send(key, Over(finish=LEFT))
                peer.is_over = True

    def correct(self, heartbeat: Heartbeat, now: float) -> None:
        """Send a peer what it must have missed, and conclude what it can no longer report."""
        job, key, orders = self.job, heartbeat.key, self._orders
        assert job is not None
        running = heartbeat.report.running
        if running not in (-1, job.round):
            self._peers.send(key, orders.halt(Stop(round=running, because="that round has ended")))
        if heartbeat.number < self._agreements.newest.number and key in self._agreements.voters:
            self._peers.send(key, self._agreements.remind(now))
        runs = running == job.round
        is_due = orders.must_repeat(key, now, self._setup.timeouts.heartbeat_s)
        if runs or not job.expects(key):
            if runs and job.stopping is not None and is_due:
                self._peers.send(key, orders.halt(job.stopping))
        elif job.round == orders.old_round:
            # It does not run the round that our predecessor began, and has no end of it to report.
            self.perform(job.never_ran(key, now, was_cut_off=True), now)
        elif job.round == orders.round and is_due:
            if job.stopping is not None:
                self._peers.send(key, orders.halt(job.stopping))
            else:
                orders.send(key, self._peers, now)
