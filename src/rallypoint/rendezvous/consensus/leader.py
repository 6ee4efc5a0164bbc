"""The coordinator's side: which agents it hears, when it counts them as lost, what it has agreed.

It asks `Coordinator` what the job needs, has the voters accept each new list of members, and only
then sends it to all. Its own agent is a peer like any other, whose messages do not use the network.
"""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from rallypoint.rendezvous.consensus.ballot import Campaign, Proposal
from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Ack,
    Agreement,
    Call,
    Heartbeat,
    Led,
    Outbox,
    Over,
    Refused,
    Unknown,
)
from rallypoint.rendezvous.consensus.peers import EndedAgents, Peer, Peers, refusal_reason
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rounds import LEFT, Rounds
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL
from rallypoint.rendezvous.job.coordinator import Coordinator, JobStage, next_notice
from rallypoint.rendezvous.job.reports import Finish, Join, NodeReport, Notice, Outcome, Refuse
from rallypoint.rendezvous.job.round import Member


class Leader:
    """One agent's time as coordinator, in one ballot.

    Attributes:
        deposed: why this agent no longer coordinates.
        finish: how the job ended, once all agents know.
    """

    def __init__(
        self,
        register: Register,
        campaign: Campaign,
        *,
        gone: EndedAgents,
        done: tuple[str, ...],
        out: Outbox,
        now: float,
    ) -> None:
        """Begin, with the won campaign; `gone` have ended, `done` may have, as they succeeded."""
        setup, rules, ballot = register.setup, register.rules, campaign.ballot
        self.deposed = ""
        self.finish: Finish | None = None
        self._setup, self._rules, self._ballot, self._out = setup, rules, ballot, out
        self._gone = EndedAgents(gone)
        self._agreements = agreements = register.agreements(campaign)
        self._peers = Peers(setup, rules, agreements, out, was_lost=campaign.was_lost, now=now)
        self._rounds = Rounds(register, ballot, agreements, self._peers, self._gone, out)
        self._over: Over | None = None  # the message to all once the job has ended
        self._over_until = inf  # when to end without those that have not
        self._scan_at = now
        bound = campaign.bound()
        self._rounds.done, self._rounds.wanted = done, bound
        self._expect(campaign.decided, now)
        if bound is None:
            self._rounds.resume(now)
        elif campaign.decided.number > BEFORE_ALL:
            self._expect(bound, now)
        self._advance(now)

    @property
    def agreement(self) -> Agreement:
        """The latest decided one."""
        return self._agreements.newest

    @property
    def round(self) -> int:
        """The latest round of workers."""
        job = self._rounds.job
        return self.agreement.round if job is None else job.round

    @property
    def wake_at(self) -> float:
        """When to call `tick` at the latest."""
        job_wakes_at = None if self._job is None else self._job.wake_at
        return self._scan_at if job_wakes_at is None else min(self._scan_at, job_wakes_at)

    @property
    def _job(self) -> Coordinator | None:
        """None until the predecessor's proposal is decided, and once the job has ended."""
        return self._rounds.job if self._over is None else None

    @property
    def peers(self) -> Collection[str]:
        """The keys of all agents that it leads, or may lead."""
        return self._peers.by_key.keys()

    @property
    def missing(self) -> str:
        """Which nodes are present and missing for a round; empty: there is one, or no job yet."""
        job = self._rounds.job
        is_gathering = job is not None and job.stage is JobStage.GATHERING
        return job.gathering.text() if job and is_gathering else ""

    def members(self, now: float) -> list[tuple[Member, float]]:
        """The members, and the time since each was heard."""
        return [(each, self._silent_s(each.key, now)) for each in self.agreement.members]

    def _silent_s(self, key: str, now: float) -> float:
        peer = self._peers.by_key.get(key)
        if peer is None or key == self._setup.me.key:
            return 0.0
        return max(0.0, now - max(peer.heard_at, peer.since))

    # What peers say.

    def joined(self, join: Join, now: float) -> None:
        """An agent asks to join, or has lost us."""
        member, key = join.member, join.member.key
        if self._over is not None:
            # An agent that never was in this job came for the next one, and asks again until that
            # begins.
            return self._peers.send(key, self._over) if join.job == self.agreement.host else None
        refusal = refusal_reason(self._setup, join)
        if refusal:
            return self._peers.send(key, Refuse(key, refusal))
        job = self._job
        if job is None or job.stage is JobStage.DONE:
            return None  # it asks again until everything is decided
        if join.job not in ("", self.agreement.host):
            return self._peers.send(key, self.led(now))  # it must leave that job first
        peer = self._peers.by_key.get(key)
        if peer is None or key not in job.gathering.here:
            self._gone.discard(key)
            self._peers.by_key[key] = peer = Peer(member, now)
            peer.has_beaten, peer.report = True, join.report
            self._admit(job, peer, join.report, now)
        if key in self._peers.by_key:
            self._peers.send(key, self.led(now))
        return self._advance(now)

    def heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """A peer's heartbeat, with its news."""
        peer = self._peers.by_key.get(heartbeat.key)
        if peer is None:
            return self._peers.send(heartbeat.key, Unknown(ballot=self._ballot))
        if peer.is_over and self._over is None:  # it has left, and the message had no effect
            return self._peers.send(heartbeat.key, Over(finish=LEFT))
        if peer.sent_at is not None and heartbeat.sent_at < peer.sent_at:
            return None  # a late one, over an older connection
        if not peer.has_beaten:
            peer.has_beaten, peer.since = True, now
        self._peers.confirms(heartbeat.key, heartbeat.stamp, now)
        peer.sent_at, peer.report = heartbeat.sent_at, heartbeat.report
        if self._over is not None:
            self._peers.send(heartbeat.key, self._over)
        elif self._job is not None:
            if heartbeat.key not in self._job.gathering.here and heartbeat.key not in self._gone:
                self._admit(self._job, peer, heartbeat.report, now)
            self._rounds.take_report(peer, heartbeat, now)
            self._rounds.correct(heartbeat, now)
        self._acknowledge(peer, heartbeat.sent_at, now)
        return self._advance(now)

    def _admit(self, job: Coordinator, peer: Peer, report: NodeReport, now: float) -> None:
        """Unless it asks for a node rank whose holder was not heard since: that may be its own
        predecessor, not yet known to be dead. One of its next heartbeats will decide.
        """
        holder = self._peers.by_key.get(job.gathering.holder_of(peer.member.wish))
        is_vacant = holder is None or holder.heard_at >= peer.since
        if is_vacant and job.stage is not JobStage.DONE:
            self._rounds.perform(job.joined(peer.member, now, report), now)

    def accepted(self, message: Accepted, now: float) -> None:
        """A voter accepts what we proposed."""
        if message.ballot != self._ballot:
            return
        self._peers.confirms(message.voter, message.stamp, now)
        if self._agreements.accepted(message):
            self._advance(now)

    def refused(self, message: Refused) -> None:
        """A voter has promised more to another agent, or has agreed on more than we know."""
        is_ours = message.job in ("", self.agreement.host) or self.agreement.host == ""
        if not is_ours or message.ballot != self._ballot:
            return
        decided = message.decided
        if self._ballot < message.promised:
            self.deposed = f"{message.promised.candidate} was promised term {message.promised.term}"
        elif decided is not None and decided.number > self.agreement.number:
            self.deposed = f"other nodes have agreement {decided.number}"

    def closed(self, key: str, why: str, now: float) -> None:
        """An agent has ended."""
        self._gone.add(key)
        peer = self._peers.by_key.pop(key, None)
        self._peers.changed()
        if peer is None:
            return
        if self._job is not None and not peer.is_over:
            self._rounds.perform(self._job.node_lost(key, why, now), now)
        self._advance(now)

    # Time.

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._job is not None:
            self._rounds.perform(self._job.tick(now), now)
        if now >= self._scan_at:
            self._scan_at = now + self._setup.timeouts.heartbeat_s
            self._peers.changed()
            self._repeat(now)
            for peer in list(self._peers.by_key.values()):
                self._check(peer, now)
            if self._over is None and not self._peers.has_quorum(now):
                self.deposed = f"no quorum answered for {self._setup.fence_s:g} s"
        self._advance(now)

    def _repeat(self, now: float) -> None:
        """Repeat what may have been lost."""
        if self._over is not None:
            return self._peers.send_all(self._over)
        self._out.add(self._agreements.repeat(now))
        if self._agreements.pending is not None:
            self._report_if_stuck(self._agreements.pending, now)
        self._out.add(self._agreements.renew(now))
        for key, peer in self._peers.by_key.items():
            if not peer.has_beaten:
                self._peers.send(key, self.led(now))
        if self.agreement.number > BEFORE_ALL:
            for at in self._setup.to_call:
                self._out.add([Call(at=at, message=self.led(None))])
        return None

    def _report_if_stuck(self, pending: Proposal, now: float) -> None:
        """A proposal of a lost coordinator may need voters that are lost as well."""
        waited_s = now - pending.since
        missing = self._agreements.missing(pending)
        text = f"the last proposal also needs {', '.join(missing[:16])}"
        wait_s = self._setup.timeouts.join_timeout_s
        if waited_s >= wait_s:
            because = f"{text}, after {waited_s:.0f} s"
            self.finish = Finish(outcome=Outcome.GIVEN_UP, because=because)
            self._peers.send_all(Over(finish=self.finish))
        elif waited_s >= pending.notice_at_s:
            pending.notice_at_s = next_notice(0.0, waited_s)
            self._peers.send_all(Notice(f"waiting for {waited_s:.0f} s so far: {text}"))

    def _check(self, peer: Peer, now: float) -> None:
        """Whether it is silent, or has been for so long that it is lost."""
        key, job = peer.member.key, self._rounds.job
        if key == self._setup.me.key or job is None:
            return
        dead_at = self._peers.dead_at(peer)
        if not peer.is_silent and self._peers.is_silent(peer, now):
            peer.is_silent = True
            why = f"no message for {self._setup.fence_s:g} s"
            self._rounds.perform(job.node_silent(key, why), now)
        if (peer.is_silent or not peer.has_beaten) and now >= dead_at:
            self._peers.by_key.pop(key)
            self._gone.add(key)
            self._rounds.perform(job.node_lost(key, "it fell silent", now), now)
        elif peer.is_silent or not peer.has_beaten:
            self._scan_at = min(self._scan_at, max(dead_at, now + 0.01))

    # Agreements.

    def led(self, stamp: float | None) -> Led:
        """The coordinator; there must be a job."""
        return Led(
            ballot=self._ballot,
            leader=self._setup.me,
            host=self.agreement.host,
            number=self.agreement.number,
            round=self.round,
            stamp=stamp,
        )

    def _advance(self, now: float) -> None:
        rounds = self._rounds
        while True:
            pending = self._agreements.pending
            if pending is not None and not self._try_complete(pending, now):
                break
            if self._over is not None:
                is_alone = all(key == self._setup.me.key for key in self._peers.by_key)
                if is_alone or now >= self._over_until:
                    self.finish = self._over.finish
                break
            wanted, rounds.wanted = rounds.wanted or rounds.shrunk(), None
            if wanted is None:
                break
            self._out.add(self._agreements.append(wanted, now))

    def _try_complete(self, pending: Proposal, now: float) -> bool:
        """Whether the proposal is complete; perform what follows from it."""
        new = pending.agreement
        was_decided = pending.is_decided
        if not self._agreements.is_decided():
            return False
        if not was_decided:
            self._out.add((), f"agreement {new.number}: {new.text}")
        job = self._rounds.job
        is_wanted = job is not None and new.runs and job.is_running(new.round)
        if is_wanted and pending.store is None and new.members[0].key not in self._gone:
            return False  # the worker store must be opened first
        self._agreements.adopt()
        self._adopt(new, now)
        if is_wanted and pending.store is not None:
            self._rounds.start(new, pending.store, now)
        return True

    def _adopt(self, new: Agreement, now: float) -> None:
        self._peers.changed()
        if new.finish is not None:
            self._over = Over(finish=new.finish)
            self._over_until = now + self._rules.tell_end_for_s()
            for peer in self._peers.by_key.values():
                peer.is_over = True
            self._peers.send_all(self._over)
            return
        for voter in self._rules.voters(new):
            self._peers.send(voter.key, self.led(now))
        if self._rounds.job is None:
            self._expect(new, now)
            self._peers.take_over(now)
            self._rounds.resume(now)
        members = {member.key for member in new.members}
        for key in [key for key in self._peers.by_key if key in self._gone and key not in members]:
            self._peers.send(key, Over(finish=LEFT))
            self._peers.by_key[key].is_over = True

    def _expect(self, agreement: Agreement, now: float) -> None:
        """These are members, as far as we know: wait for them."""
        if agreement.number == BEFORE_ALL:
            return
        for member in agreement.members:
            if member.key not in self._gone and member.key not in self._peers.by_key:
                self._peers.by_key[member.key] = Peer(member, now)
                self._peers.send(member.key, self.led(now))

    # Sending.

    def _acknowledge(self, peer: Peer, sent_at: float, now: float) -> None:
        job = self._rounds.job
        ack = Ack(
            ballot=self._ballot,
            sent_at=sent_at,
            stamp=now,
            lease_s=self._peers.lease_s(peer, now),
            number=self.agreement.number,
            waiting=0 if job is None else job.waiting,
            done=self._rounds.done,
            is_stopping=job is not None and job.stopping is not None,
        )
        self._peers.send(peer.member.key, ack)
