"""The coordinator's side of a job that others can take over: its ballot, its peers, its orders.

It asks `Coordinator` what the job needs, has the voters agree to each new list of members, and only
then tells it to all. Its own agent is a peer like any other, whose messages take no network.
"""

from __future__ import annotations

from rallypoint.rendezvous.coordinator import NOTICE_EVERY_S, Coordinator, Decision, OpenRound
from rallypoint.rendezvous.peers import Peer
from rallypoint.rendezvous.protocol import (
    Accepted,
    Ack,
    Action,
    Agreement,
    Ballot,
    Beat,
    Call,
    Go,
    Halt,
    Led,
    Message,
    Over,
    Propose,
    Refused,
    Send,
    Setup,
    Unknown,
)
from rallypoint.rendezvous.reports import (
    Ended,
    Finish,
    Join,
    Notice,
    Outcome,
    Refuse,
    Stop,
)
from rallypoint.rendezvous.round import Endpoint, Member, Round
from rallypoint.rendezvous.rules import BEFORE_ALL, Rules

_NEVER = float("-inf")
_LEFT = Finish(outcome=Outcome.STOPPED, because="this node left; the job goes on")


class Proposal:
    """An agreement that voters are asked to accept."""

    def __init__(self, agreement: Agreement, now: float) -> None:
        self.agreement = agreement
        self.since = now
        self.notice_at_s = NOTICE_EVERY_S
        self.accepted_by: set[str] = set()
        self.store: Endpoint | None = None
        self.is_decided = False


class Leader:
    """One agent's time as coordinator, in one ballot.

    Attributes:
        agreement: the newest decided one.
        deposed: why this agent coordinates no more.
        finish: how the job ended, once everyone has been told.
        wake_at: when to call `tick` at the latest.
    """

    def __init__(
        self,
        setup: Setup,
        rules: Rules,
        ballot: Ballot,
        decided: Agreement,
        *,
        bound: Agreement | None,
        slots: dict[str, str],
        gone: set[str],
        done: tuple[str, ...],
        was_lost: bool,
        now: float,
    ) -> None:
        """Begin.

        Args:
            bound: what must be proposed first.
            slots: which agent votes for which endpoint, in the first ballot.
            gone: agents that are known to have ended.
            done: members that may have ended after their workers had succeeded.
            was_lost: see Promise.
        """
        self.agreement = decided
        self.deposed = ""
        self.finish: Finish | None = None
        self.wake_at = now
        self.peers: dict[str, Peer] = {}
        self.job: Coordinator | None = None
        self._setup, self._rules, self._ballot = setup, rules, ballot
        self._key = setup.me.key
        self._slots = slots
        self._gone = set(gone)
        self._done = done
        self._was_lost = was_lost
        self._began = now
        self._safe_at = now + rules.taken_over_after_s(was_lost=was_lost)
        self._wanted = bound
        self._pending: Proposal | None = None
        self._sent_round = -1  # the newest one that this coordinator has told members to start
        self._old_round = -1  # the one that its predecessor may have
        self._sent: dict[str, Go] = {}
        self._sent_at = now
        self._unsent: set[str] = set()  # members whose Go waits for their first beat
        self._over_at: float | None = None
        self._out: list[Action] = []
        self._notes: list[str] = []
        self._quorum_heard: float | None = None  # cached
        self._words: dict[str, float] = {}  # as a peer's `heard_at`, of voters who are no peers
        self._voters = frozenset({voter.key for voter in rules.voters(decided)})  # of `agreement`
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
    def round(self) -> int:
        """The newest round of workers."""
        return self.agreement.round if self.job is None else self.job.round

    # What peers say.

    def joined(self, join: Join, now: float) -> None:
        """An agent wants to take part, or has lost sight of us."""
        member, key = join.member, join.member.key
        if self._over_at is not None:
            return self._send(key, Over(finish=self._finish_of(self.agreement)))
        wrong = self._mismatch(join)
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
        peer.confirms(beat.stamp, now, self._setup.fence_s)
        peer.round, peer.sent_at = beat.round, beat.sent_at
        if beat.key in self._voters:
            self._quorum_heard = None
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
        peer = self.peers.get(message.voter)
        if peer is not None:
            peer.confirms(message.stamp, now, self._setup.fence_s)
        else:
            self._words[message.voter] = max(self._words.get(message.voter, _NEVER), message.stamp)
        self._quorum_heard = None
        pending = self._pending
        if pending is None or message.number != pending.agreement.number:
            return
        pending.accepted_by.add(message.voter)
        if message.voter in self._slots:
            pending.accepted_by.add(self._slots[message.voter])
        if message.store is not None:
            pending.store = message.store
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
        self._quorum_heard = None
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
            self._scan_at = now + self._setup.patience.beat_s
            self._quorum_heard = None
            self._repeat(now)
            for peer in list(self.peers.values()):
                self._look_at(peer, now)
            if self._over_at is None and self._rules.must_step_down(
                now, max(self._word(now), self._began)
            ):
                self.deposed = f"no quorum heard for {self._setup.fence_s:g} s"
        self._advance(now)

    def _repeat(self, now: float) -> None:
        """Say again what may have been lost."""
        if self._pending is not None:
            self._propose(self._pending, now, is_first=False)
            self._tell_if_stuck(self._pending, now)
        self._tell_arbiter(now)
        for key, peer in self.peers.items():
            if self._over_at is not None:
                self._send(key, Over(finish=self._finish_of(self.agreement)))
            elif not peer.has_beaten:
                self._send(key, self.led(now))
        if self.agreement.number > BEFORE_ALL and self._over_at is None:
            for slot, endpoint in enumerate(self._setup.endpoints):
                if slot != self._setup.slot:
                    self._out.append(Call(at=endpoint, message=self.led(None)))

    def _tell_arbiter(self, now: float) -> None:
        """That this coordinator lives: agents say with their beats that they know it."""
        arbiter, pending = self._rules.arbiter, self._pending
        if arbiter is None or self.agreement.number == BEFORE_ALL or self._over_at is not None:
            return
        if pending is None or arbiter.key in pending.accepted_by:
            newest = self.agreement if pending is None else pending.agreement
            again = Propose(
                ballot=self._ballot, stamp=now, agreement=newest, decided=self.agreement
            )
            self._out.append(Send(to=arbiter.key, at=None, message=again))

    def _tell_if_stuck(self, pending: Proposal, now: float) -> None:
        """What a lost coordinator had begun may need voters who are lost as well."""
        waited_s = now - pending.since
        voters = self._rules.voters(pending.agreement)
        absent = [each.host for each in voters if each.key not in pending.accepted_by]
        text = f"what was proposed last needs {', '.join(absent[:16])}, too"
        patience_s = self._setup.patience.join_timeout_s
        if waited_s >= patience_s:
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
        if peer.leased_at is None and not peer.has_beaten:
            dead_at = self._safe_at
            is_silent = now - self._began >= self._setup.fence_s
        else:
            dead_at = (peer.leased_at or peer.since) + self._rules.dead_after_s()
            is_silent = now - max(peer.heard_at, peer.since) >= self._setup.fence_s
        if is_silent and not peer.is_silent:
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
            if self._pending is not None and not self._settle(self._pending, now):
                break
            if self._over_at is not None:
                self._look_who_is_left(now)
                break
            if self._wanted is None:
                self._wanted = self._shrunk()
            if self._wanted is None:
                break
            wanted, self._wanted = self._wanted, None
            new = wanted.__replace__(number=self.agreement.number + 1)
            self._pending = Proposal(new, now)
            self._propose(self._pending, now, is_first=True)
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

    def _propose(self, pending: Proposal, now: float, *, is_first: bool) -> None:
        propose = Propose(
            ballot=self._ballot, stamp=now, agreement=pending.agreement, decided=self.agreement
        )
        asked = {voter.key: voter for voter in self._rules.voters(self.agreement)}
        if self.agreement.number == BEFORE_ALL:
            asked = {}
        asked.update((voter.key, voter) for voter in self._rules.voters(pending.agreement))
        if pending.agreement.runs:
            asked[pending.agreement.members[0].key] = pending.agreement.members[0]
        for key, member in asked.items():
            needs_store = pending.agreement.runs and key == pending.agreement.members[0].key
            has_all = key in pending.accepted_by and not (needs_store and pending.store is None)
            if is_first or not has_all:
                at = Endpoint(host=member.address, port=member.port)
                self._out.append(Send(to=key, at=at, message=propose))

    def _settle(self, pending: Proposal, now: float) -> bool:
        """Whether the proposal needs no more; do what follows from it."""
        new = pending.agreement
        if not pending.is_decided:
            if not self._rules.is_decided(self.agreement, new, pending.accepted_by):
                return False
            pending.is_decided = True
            self._notes.append(f"agreement {new.number}: {_text(new)}")
        job = self.job
        is_wanted = job is not None and new.runs and job.is_running(new.round)
        if is_wanted and pending.store is None and new.members[0].key not in self._gone:
            return False  # the worker store is to be opened first
        self._pending = None
        self._hold(new, now)
        if is_wanted and pending.store is not None:
            self._go(new, pending.store, now)
        return True

    def _hold(self, new: Agreement, now: float) -> None:
        """An agreement is decided."""
        self.agreement = new
        self._voters = frozenset({voter.key for voter in self._rules.voters(new)})
        self._quorum_heard = None
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
            self._safe_at = now + self._rules.taken_over_after_s(was_lost=self._was_lost)
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
        self._old_round = held.round if held.runs else -1
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
        if decision.reason:
            self._notes.append(decision.reason)
        for action in decision.actions:
            match action:
                case OpenRound():
                    opened = self._follow_up(members=action.members, because=action.because)
                    self._wanted = opened.__replace__(round=action.number, runs=True)
                case Stop():
                    self._halt(action, now)
                case Finish():
                    ended = self._follow_up(members=self.agreement.members, because=action.because)
                    self._wanted = ended.__replace__(finish=action)
                case Notice():
                    for key in self.peers:
                        self._send(key, action)
                case Refuse():
                    self._send(action.key, action)
                    self.peers.pop(action.key, None)
        is_done = self._key in self.job.succeeded
        self._done = self.job.left_succeeded + (self._key,) * is_done

    def _go(self, new: Agreement, store: Endpoint, now: float) -> None:
        opened = Round(number=new.round, members=new.members, store=store)
        voters = self._rules.heirs(new)
        self._sent_round, self._sent_at = new.round, now
        self._sent = {
            key: Go(
                ballot=self._ballot,
                sent_at=0.0,
                lease_s=0.0,
                number=new.number,
                seat=seat,
                because=new.because,
                voters=voters,
            )
            for key, seat in opened.seats().items()
        }
        self._unsent.clear()
        for key in self._sent:
            self._send_go(key, now)

    def _send_go(self, key: str, now: float) -> None:
        peer = self.peers.get(key)
        if peer is None or peer.sent_at is None:
            self._unsent.add(key)  # its first beat brings it
            return
        self._unsent.discard(key)
        lease_s = self._lease_s(peer, now)
        self._send(key, self._sent[key].__replace__(sent_at=peer.sent_at, lease_s=lease_s))

    def _halt(self, stop: Stop, now: float) -> None:
        if stop.round in (self._sent_round, self._old_round):
            halt = Halt(ballot=self._ballot, round=stop.round, because=stop.because)
            for key in self.peers:
                self._send(key, halt)
            return
        assert self.job is not None
        self.job.revoke()
        for member in self.job.members:  # none of them was told to start
            if self.job.expects(member.key):
                end = Ended(node_rank=member.node_rank, round=stop.round, succeeded=False)
                self._perform(self.job.reported(member.key, end, now), now)

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
        job, key = self.job, beat.key
        assert job is not None
        if beat.round not in (-1, job.round):
            self._send(
                key, Halt(ballot=self._ballot, round=beat.round, because="that round is over")
            )
        if beat.number < self.agreement.number and key in self._voters:
            held = self.agreement
            again = Propose(ballot=self._ballot, stamp=now, agreement=held, decided=held)
            self._send(key, again)
        if not job.expects(key) or beat.round == job.round:
            if beat.round == job.round and job.is_stopping:
                self._send(
                    key, Halt(ballot=self._ballot, round=job.round, because=job.because_stopped)
                )
            return
        if job.round == self._old_round:
            # It is not running what our predecessor began, and has no end of it to report.
            end = Ended(node_rank=-1, round=job.round, succeeded=False, was_cut_off=True)
            self._perform(job.reported(key, end, now), now)
        elif job.round == self._sent_round and job.is_stopping:
            self._send(key, Halt(ballot=self._ballot, round=job.round, because=job.because_stopped))
        elif job.round == self._sent_round and (
            key in self._unsent or now - self._sent_at > self._setup.patience.beat_s
        ):
            self._send_go(key, now)

    # Words.

    def _acknowledge(self, peer: Peer, sent_at: float, now: float) -> None:
        ack = Ack(
            ballot=self._ballot,
            sent_at=sent_at,
            stamp=now,
            lease_s=self._lease_s(peer, now),
            seen=peer.seen,
            number=self.agreement.number,
            waiting=0 if self.job is None else self.job.waiting,
            done=self._done,
        )
        self._send(peer.member.key, ack)

    def _lease_s(self, peer: Peer, now: float) -> float:
        """For how long after its newest beat it may run workers."""
        if peer.is_silent:
            return 0.0
        lease_s = max(0.0, self._rules.lease_s(now, self._word(now)))
        if lease_s > 0:
            peer.leased_at = now
        return lease_s

    def _word(self, now: float) -> float:
        """The newest time of ours that a quorum has confirmed to have heard."""
        if self._quorum_heard is None:
            self._quorum_heard = self._find_word(now)
        return self._quorum_heard

    def _find_word(self, now: float) -> float:
        held = self.agreement
        if held.number == BEFORE_ALL:
            return self._began
        heard = dict(self._words)
        counted = self._voters if self._rules.arbiter is None else self.peers
        heard.update((key, self.peers[key].heard_at) for key in counted if key in self.peers)
        heard[self._key] = now
        pending = None if self._pending is None else self._pending.agreement
        return self._rules.newest_word(held, pending, heard)

    def _look_who_is_left(self, now: float) -> None:
        """Once the job is over: end when all others have, or have been told for long enough."""
        assert self._over_at is not None
        if now >= self._over_at or all(key == self._key for key in self.peers):
            self.finish = self._finish_of(self.agreement)

    def _finish_of(self, agreement: Agreement) -> Finish:
        if agreement.finish is None:
            raise RuntimeError("a job that is over must have an end")
        return agreement.finish

    def _mismatch(self, join: Join) -> str:
        ours, limits = self._setup, self._setup.limits
        if join.run_id != ours.run_id:
            return f"the job is {ours.run_id!r}, not {join.run_id!r}; give the same --rdzv-id"
        if join.attempt != ours.attempt:
            return (
                f"this node was started for attempt {join.attempt} of the job, which is in attempt"
                f" {ours.attempt}; end what is left of the older one"
            )
        if (join.min_nodes, join.max_nodes) != (limits.min_nodes, limits.max_nodes):
            return (
                f"--nnodes is {limits.min_nodes}:{limits.max_nodes} in the job and"
                f" {join.min_nodes}:{join.max_nodes} on this node; give the same"
            )
        return ""

    def _send(self, key: str, message: Message) -> None:
        peer = self.peers.get(key)
        self._out.append(Send(to=key, at=None if peer is None else peer.at, message=message))


def _text(agreement: Agreement) -> str:
    count = len(agreement.members)
    if agreement.finish is not None:
        return agreement.finish.outcome.value
    return f"round {agreement.round} of {count}" if agreement.runs else f"{count} stay"
