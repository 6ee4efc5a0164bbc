"""The coordinator's side of a job that others can take over: its ballot, its peers, its orders.

It asks `Coordinator` what the job needs, has the voters agree to each new list of members, and only
then tells it to all. Its own agent is a peer like any other, whose messages take no network.
"""

from __future__ import annotations

from rallypoint.rendezvous.consensus.admission import why_not
from rallypoint.rendezvous.consensus.agreements import Proposal
from rallypoint.rendezvous.consensus.agreements import text as agreement_text
from rallypoint.rendezvous.consensus.campaign import Campaign
from rallypoint.rendezvous.consensus.ended_agents import EndedAgents
from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Ack,
    Action,
    Agreement,
    Beat,
    Call,
    Led,
    Message,
    Over,
    Refused,
    Send,
    Unknown,
)
from rallypoint.rendezvous.consensus.orders import Orders
from rallypoint.rendezvous.consensus.peers import Peer, Peers
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL
from rallypoint.rendezvous.job.coordinator import NOTICE_EVERY_S, Coordinator, OpenRound
from rallypoint.rendezvous.job.decision import NOTHING, Decision
from rallypoint.rendezvous.job.reports import (
    Ended,
    Finish,
    Join,
    Notice,
    Outcome,
    Refuse,
    Stop,
)
from rallypoint.rendezvous.job.round import Endpoint, Member

_LEFT = Finish(outcome=Outcome.STOPPED, because="this node left; the job goes on")


class Leader:
    """One agent's time as coordinator, in one ballot.

    Attributes:
        peers: by key.
        deposed: why this agent coordinates no more.
        finish: how the job ended, once everyone has been told.
        wake_at: when to call `tick` at the latest.
    """

    def __init__(
        self,
        register: Register,
        campaign: Campaign,
        *,
        gone: EndedAgents,
        done: tuple[str, ...],
        now: float,
    ) -> None:
        """Begin.

        Args:
            campaign: which has won.
            gone: agents that are known to have ended.
            done: members that may have ended after their workers had succeeded.
        """
        setup, rules, decided = register.setup, register.rules, campaign.decided
        self.deposed = ""
        self.finish: Finish | None = None
        self.wake_at = now
        self.job: Coordinator | None = None
        self._setup, self._rules, self._ballot = setup, rules, campaign.ballot
        self._key = setup.me.key
        self._agreements = register.agreements(campaign)
        self._orders = Orders(campaign.ballot)
        self._presence = Peers(setup, rules, self._agreements, was_lost=campaign.was_lost, now=now)
        self.peers = self._presence.by_key
        self._gone = EndedAgents(gone)
        self._done = done
        self._wanted = bound = campaign.bound()
        self._over_at: float | None = None
        self._out: list[Action] = []
        self._notes: list[str] = []
        self._scan_at = now
        self._await(decided, now)
        if bound is None:
            self._resume(now)
        elif decided.number > BEFORE_ALL:
            self._await(bound, now)
        self._advance(now)

    def take(self) -> tuple[list[Action], str]:
        """What is to be done since the last call, and why."""
        out, self._out = self._out, []
        reason, self._notes = "; ".join(self._notes), []
        return out, reason

    @property
    def agreement(self) -> Agreement:
        """The newest decided one."""
        return self._agreements.newest

    @property
    def round(self) -> int:
        """The newest round of workers."""
        return self.agreement.round if self.job is None else self.job.round

    # What peers say.

    def joined(self, join: Join, now: float) -> None:
        """An agent wants to take part, or has lost sight of us."""
        member, key = join.member, join.member.key
        if self._over_at is not None:
            # Who never was in this job came for the next one, and asks again until that begins.
            if join.job == self.agreement.host:
                self._send(key, Over(finish=self._finish_of(self.agreement)))
            return None
        wrong = why_not(self._setup, join)
        if wrong:
            return self._send(key, Refuse(key, wrong))
        if self.job is None:
            return None  # it asks again
        if join.running >= 0 and join.job != self.agreement.host:
            return self._send(key, self.led(now))  # its old workers first
        peer = self.peers.get(key)
        if peer is None or key not in self.job.here:
            self._gone.discard(key)
            self.peers[key] = peer = Peer(member, now)
            peer.has_beaten = True
            self._perform(self.job.joined(member, now, join.last_round), now)
        if key in self.peers:
            self._send(key, self.led(now))
        return self._advance(now)

    def beat(self, beat: Beat, now: float) -> None:
        """A peer is here, and tells what is new."""
        peer = self.peers.get(beat.key)
        if peer is None:
            return self._send(beat.key, Unknown(ballot=self._ballot))
        if not peer.has_beaten:
            peer.has_beaten, peer.since = True, now
        self._presence.confirms(beat.key, beat.stamp, now)
        peer.round, peer.sent_at = beat.round, beat.sent_at
        if self.job is not None and self._over_at is None:
            if beat.key not in self.job.here and beat.key not in self._gone:
                self._perform(self.job.joined(peer.member, now), now)
            self._take_reports(peer, beat, now)
            self._correct(peer, beat, now)
        elif self._over_at is not None:
            self._send(beat.key, Over(finish=self._finish_of(self.agreement)))
        self._acknowledge(peer, beat.sent_at, now)
        return self._advance(now)

    def accepted(self, message: Accepted, now: float) -> None:
        """A voter accepts what we proposed."""
        if message.ballot != self._ballot:
            return
        self._presence.confirms(message.voter, message.stamp, now)
        if self._agreements.accepted(message):
            self._advance(now)

    def refused(self, message: Refused) -> None:
        """Another one was promised more, or has agreed on more than we know of."""
        is_ours = message.job in ("", self.agreement.host) or self.agreement.host == ""
        if not is_ours or message.ballot != self._ballot:
            return
        decided = message.decided
        if self._ballot < message.promised:
            self.deposed = f"{message.promised.candidate} was promised term {message.promised.term}"
        elif decided is not None and decided.number > self.agreement.number:
            self.deposed = f"others know of agreement {decided.number}"

    def closed(self, key: str, why: str, now: float) -> None:
        """An agent has ended."""
        self._gone.add(key)
        peer = self.peers.pop(key, None)
        self._presence.look_again()
        if peer is None:
            return
        if self.job is not None and self._over_at is None and not peer.is_over:
            self._perform(self.job.node_lost(key, why, now), now)
        self._advance(now)

    # Time.

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.job is not None and self._over_at is None:
            self._perform(self.job.tick(now), now)
        if now >= self._scan_at:
            self._scan_at = now + self._setup.timeouts.beat_s
            self._presence.look_again()
            self._repeat(now)
            for peer in list(self.peers.values()):
                self._look_at(peer, now)
            if self._over_at is None and not self._presence.has_quorum(now):
                self.deposed = f"no quorum heard for {self._setup.fence_s:g} s"
        self._advance(now)

    def _repeat(self, now: float) -> None:
        """Say again what may have been lost."""
        self._out += self._agreements.repeat(now)
        if self._agreements.pending is not None:
            self._tell_if_stuck(self._agreements.pending, now)
        if self._over_at is None:
            self._out += self._agreements.renew(now)
        for key, peer in self.peers.items():
            if self._over_at is not None:
                self._send(key, Over(finish=self._finish_of(self.agreement)))
            elif not peer.has_beaten:
                self._send(key, self.led(now))
        if self.agreement.number > BEFORE_ALL and self._over_at is None:
            for slot, endpoint in enumerate(self._setup.endpoints):
                if slot != self._setup.slot:
                    self._out.append(Call(at=endpoint, message=self.led(None)))

    def _tell_if_stuck(self, pending: Proposal, now: float) -> None:
        """What a lost coordinator had begun may need voters who are lost as well."""
        waited_s = now - pending.since
        missing = self._agreements.missing(pending)
        text = f"what was proposed last needs {', '.join(missing[:16])}, too"
        wait_s = self._setup.timeouts.join_timeout_s
        if waited_s >= wait_s:
            because = f"{text}, after {waited_s:.0f} s"
            self.finish = Finish(outcome=Outcome.GIVEN_UP, because=because)
            for key in self.peers:
                self._send(key, Over(finish=self.finish))
        elif waited_s >= pending.notice_at_s:
            pending.notice_at_s += NOTICE_EVERY_S
            for key in self.peers:
                self._send(key, Notice(f"waiting for {waited_s:.0f} s so far: {text}"))

    def _look_at(self, peer: Peer, now: float) -> None:
        key, job = peer.member.key, self.job
        if key == self._key or job is None:
            return
        dead_at = self._presence.dead_at(peer)
        if not peer.is_silent and self._presence.is_silent(peer, now):
            peer.is_silent = True
            self._perform(job.node_silent(key, f"nothing came for {self._setup.fence_s:g} s"), now)
        if (peer.is_silent or not peer.has_beaten) and now >= dead_at:
            self.peers.pop(key)
            self._gone.add(key)
            self._perform(job.node_lost(key, "it fell silent", now), now)
        elif peer.is_silent or not peer.has_beaten:
            self._scan_at = min(self._scan_at, max(dead_at, now + 0.01))

    # Agreements.

    def led(self, stamp: float | None) -> Led:
        """Who coordinates; there must be a job."""
        return Led(
            ballot=self._ballot,
            leader=self._setup.me,
            host=self.agreement.host,
            number=self.agreement.number,
            round=self.round,
            stamp=stamp,
        )

    def _advance(self, now: float) -> None:
        """Go on with agreements as far as they go."""
        while True:
            pending = self._agreements.pending
            if pending is not None and not self._settle(pending, now):
                break
            if self._over_at is not None:
                self._look_who_is_left(now)
                break
            if self._wanted is None:
                self._wanted = self._shrunk()
            if self._wanted is None:
                break
            wanted, self._wanted = self._wanted, None
            self._out += self._agreements.append(wanted, now)
        alarm = None if self.job is None or self._over_at is not None else self.job.wake_at
        self.wake_at = self._scan_at if alarm is None else min(self._scan_at, alarm)

    def _shrunk(self) -> Agreement | None:
        """A list without those who are gone, so that they are not needed for a quorum any more."""
        if self.job is None or self.job.is_busy:
            return None
        left = [each for each in self.agreement.members if each.key not in self._gone]
        if len(left) == len(self.agreement.members) or self.agreement.number == BEFORE_ALL:
            return None
        shrunk = self._follow_up(members=tuple(left), because="some have left")
        if left and not (self._setup.quorum == "host" and self.agreement.host in self._gone):
            return shrunk
        because = "the last node left"
        ended = Finish(outcome=Outcome.STOPPED, because=because, was_cut_off=True)
        if left:
            ended = ended.__replace__(because="the node that began the job left")
        return shrunk.__replace__(members=self.agreement.members, finish=ended)

    def _follow_up(self, *, members: tuple[Member, ...], because: str) -> Agreement:
        assert self.job is not None
        return Agreement(
            number=0,
            members=members,
            round=self.job.round,
            restarts=self.job.restarts,
            because=because,
            host=self.agreement.host,
        )

    def _settle(self, pending: Proposal, now: float) -> bool:
        """Whether the proposal needs no more; do what follows from it."""
        new = pending.agreement
        was_decided = pending.is_decided
        if not self._agreements.is_decided():
            return False
        if not was_decided:
            self._notes.append(f"agreement {new.number}: {agreement_text(new)}")
        job = self.job
        is_wanted = job is not None and new.runs and job.is_running(new.round)
        if is_wanted and pending.store is None and new.members[0].key not in self._gone:
            return False  # the worker store is to be opened first
        self._agreements.hold()
        self._hold(new, now)
        if is_wanted and pending.store is not None:
            self._go(new, pending.store, now)
        return True

    def _hold(self, new: Agreement, now: float) -> None:
        """An agreement is decided."""
        self._presence.look_again()
        if new.finish is not None:
            self._over_at = now + self._setup.fence_s
            for key, peer in self.peers.items():
                peer.is_over = True
                self._send(key, Over(finish=new.finish))
            return
        for voter in self._rules.voters(new):
            self._send(voter.key, self.led(now))
        if self.job is None:
            self._await(new, now)
            self._presence.take_over(now)
            self._resume(now)
        members = {member.key for member in new.members}
        for key in [key for key in self.peers if key in self._gone and key not in members]:
            self._send(key, Over(finish=_LEFT))
            self.peers[key].is_over = True

    def _await(self, agreement: Agreement, now: float) -> None:
        """These are members, as far as we know: look for them."""
        if agreement.number == BEFORE_ALL:
            return
        for member in agreement.members:
            if member.key not in self._gone and member.key not in self.peers:
                self.peers[member.key] = Peer(member, now)
                self._send(member.key, self.led(now))

    def _resume(self, now: float) -> None:
        held = self.agreement
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
            if key in self._done and held.runs:
                end = Ended(node_rank=member.node_rank, round=held.round, succeeded=True)
                self._perform(self.job.reported(key, end, now), now)
            if key in self._gone:
                self._perform(self.job.node_lost(key, "its connection closed", now), now)
            elif key in self.peers and self.peers[key].has_beaten and not held.runs:
                self._perform(self.job.joined(member, now), now)
        self._perform(self.job.tick(now), now)

    # Rounds.

    def _perform(self, decision: Decision, now: float) -> None:
        assert self.job is not None
        while decision != NOTHING:
            decision = self._do(decision, now)
        is_done = self._key in self.job.current.succeeded
        self._done = self.job.current.left_succeeded + (self._key,) * is_done

    def _do(self, decision: Decision, now: float) -> Decision:
        """Returns what follows from it at once."""
        if decision.reason:
            self._notes.append(decision.reason)
        left = NOTHING
        for action in decision.actions:
            match action:
                case OpenRound():
                    opened = self._follow_up(members=action.members, because=action.because)
                    self._wanted = opened.__replace__(round=action.number, runs=True)
                case Stop():
                    left += self._halt(action, now)
                case Finish():
                    ended = self._follow_up(members=self.agreement.members, because=action.because)
                    self._wanted = ended.__replace__(finish=action)
                case Notice():
                    for key in self.peers:
                        self._send(key, action)
                case Refuse():
                    self._send(action.key, action)
                    self.peers.pop(action.key, None)
        return left

    def _go(self, new: Agreement, store: Endpoint, now: float) -> None:
        for key in self._orders.begin(new, store, self._rules.heirs(new), now):
            self._send_go(key, now)

    def _send_go(self, key: str, now: float) -> None:
        peer = self.peers.get(key)
        if peer is None or peer.sent_at is None:
            return self._orders.put_off(key)
        return self._send(
            key, self._orders.go(key, peer.sent_at, self._presence.lease_s(peer, now))
        )

    def _halt(self, stop: Stop, now: float) -> Decision:
        """Pass it on; what follows at once if no member was told to start."""
        assert self.job is not None
        if not self._orders.may_run(stop.round):
            return self.job.revoked(now)
        halt = self._orders.halt(stop)
        for key in self.peers:
            self._send(key, halt)
        return NOTHING

    def _take_reports(self, peer: Peer, beat: Beat, now: float) -> None:
        assert self.job is not None
        for number, report in enumerate(beat.reports, beat.first):
            if number < peer.seen:
                continue
            peer.seen = number + 1
            self._perform(self.job.reported(beat.key, report, now), now)
            if beat.key not in self.job.here:  # it left
                self._gone.add(beat.key)
                if all(member.key != beat.key for member in self.agreement.members):
                    self._send(beat.key, Over(finish=_LEFT))
        peer.seen = max(peer.seen, beat.first)

    def _correct(self, peer: Peer, beat: Beat, now: float) -> None:
        """Tell a peer what it must have missed, and judge from what it cannot know any more."""
        job, key, orders = self.job, beat.key, self._orders
        assert job is not None
        if beat.round not in (-1, job.round):
            self._send(key, orders.halt(Stop(round=beat.round, because="that round is over")))
        if beat.number < self.agreement.number and key in self._agreements.voters:
            self._send(key, self._agreements.remind(now))
        if not job.expects(key) or beat.round == job.round:
            if beat.round == job.round and job.is_stopping:
                self._send(key, orders.halt(Stop(round=job.round, because=job.because_stopped)))
            return
        if job.round == orders.old_round:
            # It is not running what our predecessor began, and has no end of it to report.
            end = Ended(node_rank=-1, round=job.round, succeeded=False, was_cut_off=True)
            self._perform(job.reported(key, end, now), now)
        elif job.round == orders.round and job.is_stopping:
            self._send(key, orders.halt(Stop(round=job.round, because=job.because_stopped)))
        elif job.round == orders.round and orders.must_repeat(
            key, now, self._setup.timeouts.beat_s
        ):
            self._send_go(key, now)

    # Words.

    def _acknowledge(self, peer: Peer, sent_at: float, now: float) -> None:
        ack = Ack(
            ballot=self._ballot,
            sent_at=sent_at,
            stamp=now,
            lease_s=self._presence.lease_s(peer, now),
            seen=peer.seen,
            number=self.agreement.number,
            waiting=0 if self.job is None else self.job.waiting,
            done=self._done,
        )
        self._send(peer.member.key, ack)

    def _look_who_is_left(self, now: float) -> None:
        """Once the job is over: end when all others have, or have been told for long enough."""
        assert self._over_at is not None
        if now >= self._over_at or all(key == self._key for key in self.peers):
            self.finish = self._finish_of(self.agreement)

    def _finish_of(self, agreement: Agreement) -> Finish:
        if agreement.finish is None:
            raise RuntimeError("a job that is over must have an end")
        return agreement.finish

    def _send(self, key: str, message: Message) -> None:
        peer = self.peers.get(key)
        self._out.append(Send(to=key, at=None if peer is None else peer.at, message=message))
