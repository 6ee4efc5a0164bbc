"""The voter of a job whose agreements a keeper holds: messages in, requests to it and answers out.

    Prepare ->  read who coordinates; if no one may object, become the claimant    -> Promise
    Propose ->  write the agreement, or only a heartbeat, if the claim is still ours    -> Accepted
    Join    ->  read who coordinates                                               -> Led
    each of them may be answered by Refused, or by Over: the job has ended

Each agent has one, which speaks for the keeper (etcd, or a store) to its own `Participant` only. It
works on one message at a time: `ask` and `go_on` give the next request until there is none, then
`take` gives the answers. No socket, clock or thread here (key_value_link.py has them); what may be
done is in key_value_register.py.

    request = voter.ask(message, now)
    while request is not None:
        request = voter.go_on(perform(request), now)     # or voter.failed(why)
    answers = voter.take()
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from rallypoint.base.record import Record
from rallypoint.rendezvous.consensus.messages import (
    NO_BALLOT,
    Accepted,
    Agreement,
    Ballot,
    Led,
    Message,
    Over,
    Prepare,
    Promise,
    Propose,
    Refused,
    Setup,
)
from rallypoint.rendezvous.consensus.peers import EndedAgents
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, KEEPER
from rallypoint.rendezvous.job.reports import Finish, Join, Outcome
from rallypoint.rendezvous.keyvalue.keeper import (
    Claim,
    Grant,
    JobKeys,
    KeepAlive,
    Read,
    Request,
    Transact,
    pack,
    unpack,
)
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRules

_JOB_TTL_S = 3600  # a job is forgotten this long after its last coordinator's end
_KEEP_ALIVE_S = 300.0


# A message to the agent; or why there is none, for `Participant.unreachable`.
Answer = Message | str
_Steps = Generator[Request, Any, list[Answer]]  # requests, whose results are sent; the answers


class _Vote(Record, kw_only=True):
    """What was read of the claim; `closed`: why no further job of this name may run."""

    claim: Claim | None
    revision: int
    beat_revision: int
    closed: str

    @property
    def ballot(self) -> Ballot:
        return NO_BALLOT if self.claim is None else self.claim.ballot


class KeyValueVoter:
    """The keeper, as this agent's `Participant` sees it."""

    def __init__(self, setup: Setup, rules: type[KeyValueRules] = KeyValueRules) -> None:
        self._setup = setup
        self._rules = rules(setup)
        self._keys = JobKeys(setup.run_id, setup.attempt)
        self._lost = EndedAgents()
        self._now = 0.0
        self._steps: _Steps | None = None
        self._answers: list[Answer] = []
        # The claim and heartbeat as last read, and when they were first seen.
        self._last_read = (-1, -1)
        self._unchanged_since = 0.0
        # Our own claim, while it may be valid.
        self._claim: Claim | None = None
        self._revision = 0
        self._held: Agreement | None = None
        self._held_revision = 0
        self._kept_at = 0.0
        self._beats = 0

    def lost(self, key: str) -> None:
        """An agent has ended; call `Participant.closed` as well."""
        self._lost.add(key)

    def ask(self, message: Message, now: float) -> Request | None:
        """Begin with a message; returns the first request."""
        match message:
            case Prepare():
                self._steps = self._prepare(message)
            case Propose():
                self._steps = self._propose(message)
            case Join():
                self._steps = self._find(message)
            case _:  # other messages to voters are only for agents
                return None
        self._now = now
        return self._next(None)

    def go_on(self, result: object, now: float) -> Request | None:
        """The request was carried out; returns the next one."""
        self._now = now
        return self._next(result)

    def failed(self, why: str) -> None:
        """The request failed, as far as we know; give up the message."""
        if self._steps is not None:
            self._steps.close()
        self._steps = None
        self._answers.append(why)

    def take(self) -> list[Answer]:
        """The answers for the agent, in the keeper's name."""
        answers, self._answers = self._answers, []
        return answers

    def resign(self) -> Request | None:
        """Give up the claim, if this agent has one, so that the next candidate need not wait.

        That one treats it as lost: the members keep their leases, and it has to wait for those.
        """
        if self._claim is None or self._claim.finish is not None:
            return None
        keys, revision = self._keys, self._revision
        self._claim = None
        return Transact(
            revisions={keys.claim: revision},
            puts={keys.heartbeat: self._beat()},
            deletes=(keys.claim,),
        )

    def _next(self, result: object) -> Request | None:
        if self._steps is None:
            return None
        try:
            return self._steps.send(result)
        except StopIteration as end:
            self._steps = None
            self._answers += end.value
            return None

    # What it reads.

    def _read_vote(self) -> Generator[Request, Any, _Vote]:
        """Check which agent coordinates; record since when nothing has been written."""
        found = {pair.key: pair for pair in (yield Read(prefix=self._keys.vote)).pairs}
        claim, heartbeat = found.get(self._keys.claim), found.get(self._keys.heartbeat)
        closed = found.get(self._keys.closed)
        vote = _Vote(
            claim=None if claim is None else unpack(Claim, claim.value),
            revision=0 if claim is None else claim.revision,
            beat_revision=0 if heartbeat is None else heartbeat.revision,
            closed="" if closed is None else closed.value.decode(errors="replace"),
        )
        if self._last_read != (vote.revision, vote.beat_revision):
            self._last_read = (vote.revision, vote.beat_revision)
            self._unchanged_since = self._now
        return vote

    def _read_agreement(self) -> Generator[Request, Any, tuple[Agreement | None, int]]:
        pairs = (yield Read(prefix=self._keys.agreements)).pairs
        return (unpack(Agreement, pairs[0].value), pairs[0].revision) if pairs else (None, 0)

    def _end_of(  # noqa: PLR0911 - one line for each case
        self, job: str, vote: _Vote
    ) -> Generator[Request, Any, Finish | None]:
        """How that job ended, "" if unknown to the agent; None: it continues, or has not begun."""
        claim = vote.claim
        if vote.closed:
            return Finish(outcome=Outcome.STOPPED, because=vote.closed)
        if claim is not None and job in ("", claim.host):
            # A job that was stopped from outside is one that a scheduler restarts.
            if claim.finish is None or job:
                return claim.finish
            return None if claim.finish.outcome is Outcome.STOPPED else self._too_late(claim.finish)
        if not job:
            return None
        key = self._keys.closed_job(job)
        for pair in (yield Read(prefix=self._keys.closed_jobs)).pairs:
            if pair.key == key:
                return unpack(Finish, pair.value)
        if claim is None:
            return None  # the keeper has lost its data: an agent that knows the job restores it
        keeper = self._rules.keeper
        because = f"{keeper} no longer holds this node's job; another job has taken its name"
        return Finish(outcome=Outcome.GIVEN_UP, because=because)

    def _too_late(self, finish: Finish) -> Finish:
        """For an agent that knows nothing of the job, and may belong to another one."""
        because = (
            f"the job {self._setup.run_id!r} is over ({finish.because}), and this node joined "
            "too late; start a new job with another --rdzv-id, or "
            f"{self._setup.timeouts.close_s:g} s later"
        )
        return Finish(outcome=Outcome.GIVEN_UP, because=because)

    # The requests to it.

    def _find(self, join: Join) -> _Steps:
        vote = yield from self._read_vote()
        end = yield from self._end_of(join.job, vote)
        if end is not None:
            return [Over(finish=end)]
        claim = vote.claim
        if claim is None or claim.finish is not None:
            return []
        return [Led(ballot=claim.ballot, leader=claim.leader, host=claim.host, number=-1, round=-1)]

    def _prepare(self, message: Prepare) -> _Steps:
        vote = yield from self._read_vote()
        job = message.decided.host
        end = yield from self._end_of(job, vote)
        if end is not None:
            return [Over(finish=end)]
        # The remains of a job that was stopped are cleared; another one begins.
        old = vote.claim if vote.claim is None or vote.claim.finish is None else None
        if old is not None:
            may_promise = self._rules.may_promise(message.ballot, old.ballot)
            if not may_promise or self._must_wait(old) > 0:
                return self._refused(message.ballot, vote)
        return (yield from self._promise(message, vote, old))

    def _must_wait(self, claim: Claim) -> float:
        """At least this long; the agreement, which may require more, is not known here."""
        candidate = claim.ballot.candidate
        if candidate == self._setup.me.key or candidate in self._lost:
            return 0.0
        fence_s = self._rules.must_wait_s(candidate, None, ())
        return self._unchanged_since + fence_s - self._now

    def _promise(self, message: Prepare, vote: _Vote, old: Claim | None) -> _Steps:
        held, held_revision = yield from self._read_agreement()
        if old is None and vote.claim is not None:
            held = None
        me, leader, job = self._setup.me, vote.ballot.candidate, message.decided.host
        if held is None and job and message.decided.number == BEFORE_ALL:
            forgot = (
                f"{self._rules.keeper} has lost the job's record; waiting for a node that knows it"
            )
            return [forgot]
        if held is not None and held.number > message.decided.number:
            return self._refused(message.ballot, vote, held)  # first learn, then ask again
        silent_s = self._now - self._unchanged_since
        was_lost = old is None and job != ""  # it is unknown when the coordinator last wrote
        if old is not None:
            wait_s = self._rules.must_wait_s(leader, held, self._lost)
            if leader != me.key and silent_s < wait_s:
                return self._refused(message.ballot, vote)
            # If it is our own claim, we may have made it early as well.
            was_lost = leader == me.key or silent_s < self._rules.must_wait_s(leader, None, ())
        promise = Promise(
            ballot=message.ballot,
            voter=KEEPER,
            member=me,
            stamp=message.stamp,
            accepted=None,
            accepted_in=NO_BALLOT,
            was_lost=was_lost,
            is_trial=message.is_trial,
        )
        if not message.is_trial:
            keys, lease = self._keys, ""
            if old is not None and (yield KeepAlive(lease=old.lease)):
                lease = old.lease
            lease = lease or (yield Grant(ttl_s=_JOB_TTL_S))
            claim = Claim(ballot=message.ballot, leader=me, host=job or me.key, lease=lease)
            done = yield Transact(
                revisions={
                    keys.claim: vote.revision,
                    keys.heartbeat: vote.beat_revision,
                    keys.agreement: held_revision,
                    keys.closed: 0,
                },
                puts={keys.claim: pack(claim), keys.heartbeat: self._beat()},
                deletes=(keys.agreement,) if held is None and held_revision else (),
                lease=lease,
            )
            if done is None:
                return self._refused(message.ballot, (yield from self._read_vote()))
            self._claim, self._revision, self._kept_at = claim, done, self._now
            self._held, self._held_revision = held, 0 if held is None else held_revision
        return [promise]

    def _propose(self, message: Propose) -> _Steps:
        claim, new, closed = self._claim, message.agreement, ""
        if claim is None or claim.ballot != message.ballot:
            return []  # from before our latest claim
        if new.finish is not None:
            lease = yield Grant(ttl_s=math.ceil(self._setup.timeouts.close_s))
            claim = claim.__replace__(lease=lease, finish=new.finish)
            # Members that cannot hear it now search for it for join_timeout_s.
            closed = yield Grant(ttl_s=math.ceil(2 * self._setup.timeouts.join_timeout_s))
        elif self._now - self._kept_at > _KEEP_ALIVE_S:
            yield KeepAlive(lease=claim.lease)
            self._kept_at = self._now
        done = yield self._write(claim, new, closed)
        if done is None:
            vote = yield from self._read_vote()
            if vote.ballot != message.ballot or vote.closed:
                answers = yield from self._deposed(message, vote)
                self._claim = None
                return answers
            # An unanswered write of ours was carried out; or, so far, none at all.
            self._revision = vote.revision
            self._held, self._held_revision = yield from self._read_agreement()
            done = yield self._write(claim, new, closed)
            if done is None:
                return []  # it will be asked again
        if self._is_new(new):
            self._held, self._held_revision = new, done
        if new.finish is not None:
            self._claim, self._revision = claim, done
        return [
            Accepted(ballot=message.ballot, voter=KEEPER, stamp=message.stamp, number=new.number)
        ]

    def _is_new(self, agreement: Agreement) -> bool:
        return self._held is None or agreement.number > self._held.number

    def _write(self, claim: Claim, new: Agreement, closed: str) -> Transact:
        """A heartbeat, the agreement if it is new, and the outcome of a job that ends."""
        keys = self._keys
        revisions, puts = (
            {keys.claim: self._revision, keys.closed: 0},
            {keys.heartbeat: self._beat()},
        )
        if self._is_new(new):
            # Otherwise an older one, whose answer is no longer awaited, might still follow it.
            revisions[keys.agreement] = self._held_revision
            puts[keys.agreement] = pack(new)
        leases = {}
        if claim.finish is not None:
            del revisions[keys.closed]  # the job ends anyway, and its members are notified
            word = keys.closed_job(claim.host)
            puts[keys.claim], puts[word], leases[word] = pack(claim), pack(claim.finish), closed
        return Transact(revisions=revisions, puts=puts, lease=claim.lease, leases=leases)

    def _deposed(self, message: Propose, vote: _Vote) -> _Steps:
        end = yield from self._end_of(message.agreement.host, vote)
        if end is not None:
            return [Over(finish=end)]
        if vote.claim is None:  # the keeper has lost its data; claim it anew
            promised = Ballot(message.ballot.term + 1, KEEPER)
            return [Refused(ballot=message.ballot, promised=promised)]
        return self._refused(message.ballot, vote)

    # Its answers.

    def _beat(self) -> bytes:
        """A value that no other write has."""
        self._beats += 1
        return f"{self._setup.me.key} {self._beats}".encode()

    def _refused(
        self, ballot: Ballot, vote: _Vote, decided: Agreement | None = None
    ) -> list[Answer]:
        claim = vote.claim
        refused = Refused(
            ballot=ballot,
            promised=vote.ballot,
            job="" if claim is None else claim.host,
            leader=None if claim is None or decided is not None else claim.leader,
            decided=decided,
        )
        if claim is None or decided is not None or claim.leader.key == self._setup.me.key:
            return [refused]
        who, silent_s = claim.leader, self._now - self._unchanged_since
        why = (
            f"{who.host} ({who.address}:{who.port}) coordinates, but does not answer this node; it "
            f"last wrote {silent_s:.0f} s ago"
        )
        return [refused, why]


def is_same(message: Message, at_work: Message | None) -> bool:
    """Whether that is already being answered: a candidate repeats itself when etcd is slow."""
    if isinstance(message, Prepare) and isinstance(at_work, Prepare):
        return (message.ballot, message.decided) == (at_work.ballot, at_work.decided)
    return isinstance(message, Join) and isinstance(at_work, Join)
