"""One ballot: a candidate's campaign for it, and the agreements of the coordinator that has won it.

A campaign asks all voters of the latest agreement that the candidate knows for one ballot. It only
counts; participant.py decides when to start one, and with which term. Then:

    wanted --append--> pending --a quorum of the old list and one of the new--> newest

Agreements are numbered, and proposed one at a time. rounds.py says which list is wanted, leader.py
what follows once it is decided, and rules.py who decides.
"""

from __future__ import annotations

from collections.abc import Collection

from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Action,
    Agreement,
    Ballot,
    Call,
    Prepare,
    Promise,
    Propose,
    SendMessage,
    Setup,
)
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, Rules
from rallypoint.rendezvous.job.coordinator import next_notice
from rallypoint.rendezvous.job.round import Endpoint, Member


class Campaign:
    """The votes of one ballot.

    Attributes:
        is_trial: whether voters are only asked whether they would promise.
        won_at: when a quorum had promised; None: not yet.
    """

    is_trial = True

    def __init__(
        self, setup: Setup, rules: Rules, ballot: Ballot, decided: Agreement, now: float
    ) -> None:
        self.ballot = ballot
        self.decided = decided
        self.won_at: float | None = None
        self._setup, self._rules = setup, rules
        self._promises: dict[str, Promise] = {}
        self._stamp = now

    def ask(self) -> list[Action]:
        """Ask every voter; at the beginning of a job, every endpoint."""
        prepare = Prepare(
            ballot=self.ballot, stamp=self._stamp, decided=self.decided, is_trial=self.is_trial
        )
        if self.decided.number == BEFORE_ALL:
            return [
                SendMessage(to=self._setup.me.key, at=None, message=prepare)
                if slot == self._setup.slot
                else Call(at=endpoint, message=prepare)
                for slot, endpoint in enumerate(self._setup.endpoints)
            ]
        return [
            SendMessage(to=each.key, at=each.endpoint, message=prepare)
            for each in self._rules.voters(self.decided)
        ]

    def in_earnest(self) -> list[Action]:
        """Enough voters would promise: ask them to."""
        self.is_trial, self.won_at = False, None
        self._promises.clear()
        return self.ask()

    def promised(self, promise: Promise, now: float) -> None:
        """A voter promises."""
        if promise.ballot != self.ballot or promise.is_trial != self.is_trial:
            return
        self._promises[promise.voter] = promise
        if self.won_at is None and self._rules.is_quorum(self.decided, self._promises.keys()):
            self.won_at = now

    @property
    def is_unanimous(self) -> bool:
        """Whether no further vote can come."""
        return len(self._promises) >= len(self._rules.voters(self.decided))

    @property
    def was_lost(self) -> bool:
        """Whether some promised before the lease of their coordinator was over."""
        return any(promise.was_lost for promise in self._promises.values())

    def bound(self) -> Agreement | None:
        """What the winner must propose first; a job begins with the nodes that agreed to it."""
        found = self._rules.bound_to(self._promises.values(), self.decided.number + 1)
        if found is None and self.decided.number == BEFORE_ALL:
            members = [self._promises[key].member for key in sorted(self._promises)]
            return Agreement(number=0, members=tuple(members), host=self._setup.me.key)
        return found

    def slots(self) -> dict[str, str]:
        """Which agents vote for which endpoint."""
        if self.decided.number > BEFORE_ALL:
            return {}
        return {promise.member.key: key for key, promise in self._promises.items()}

    def missing(self) -> list[Member]:
        """The voters that have not promised."""
        voters = self._rules.voters(self.decided)
        return [voter for voter in voters if voter.key not in self._promises]

    def text(self) -> str:
        """The state, for people: which voters are missing, and why the others are not enough."""
        voters = self._rules.voters(self.decided)
        missing = self.missing()
        absent = ", ".join([voter.host for voter in missing[:16]])
        here = len(voters) - len(missing)
        what = "endpoints" if self.decided.number == BEFORE_ALL else "last agreed members"
        tie = ""
        if 2 * here == len(voters):
            tie = f"; of two equal halves, the one with {voters[0].host} continues"
        return f"{here} of {len(voters)} {what} here, too few to continue{tie}; missing {absent}"


_READ_IN_A_BEAT = 3000  # members, by a voter that shares its machine: 10,000 are megabytes


class Proposal:
    """An agreement that voters are asked to accept.

    Attributes:
        asked_at: when they were last asked.
        store: the store of its round's workers, once that is open.
    """

    def __init__(self, agreement: Agreement, now: float) -> None:
        self.agreement = agreement
        self.since = self.asked_at = now
        self.notice_at_s = next_notice(0.0, 0.0)
        self.accepted_by: set[str] = set()
        self.store: Endpoint | None = None
        self.is_decided = False


class Agreements:
    """The agreements of one ballot.

    Attributes:
        newest: the latest decided one.
        voters: the keys of the nodes that decide on the next one.
        pending: the current proposal.
    """

    def __init__(
        self, setup: Setup, rules: Rules, ballot: Ballot, decided: Agreement, slots: dict[str, str]
    ) -> None:
        """Begin; `slots` says which agent votes for which endpoint, in the first ballot."""
        self.newest = decided
        self.voters = frozenset({voter.key for voter in rules.voters(decided)})
        self.pending: Proposal | None = None
        self._setup, self._rules, self._ballot = setup, rules, ballot
        self._slots = slots

    def append(self, wanted: Agreement, now: float) -> list[Action]:
        """Propose that one next."""
        assert self.pending is None
        new = wanted.__replace__(number=self.newest.number + 1)
        self.pending = Proposal(new, now)
        return self._ask(self.pending, now, is_first=True)

    def repeat(self, now: float) -> list[Action]:
        """Ask voters that have not accepted again, after enough time to read a long list."""
        pending = self.pending
        if pending is None:
            return []
        heartbeats = len(pending.agreement.members) // _READ_IN_A_BEAT
        if now < pending.asked_at + heartbeats * self._setup.timeouts.heartbeat_s:
            return []
        return self._ask(pending, now, is_first=False)

    def renew(self, now: float) -> list[Action]:
        """Report that this coordinator is alive; agents confirm it with their heartbeats."""
        return []

    def counted(self, known: Collection[str]) -> Collection[str]:
        """Of these agents, those that determine how long this one may continue by hearing it."""
        return self.voters

    def remind(self, now: float) -> Propose:
        """Send a voter the latest one, which it has missed."""
        return self._message(self.newest, now)

    def accepted(self, message: Accepted) -> bool:
        """A voter accepts; returns whether that is the current proposal."""
        pending = self.pending
        if pending is None or message.number != pending.agreement.number:
            return False
        pending.accepted_by.add(message.voter)
        if message.voter in self._slots:
            pending.accepted_by.add(self._slots[message.voter])
        if message.store is not None:
            pending.store = message.store
        return True

    def is_decided(self) -> bool:
        """Whether the current proposal is decided."""
        pending = self.pending
        assert pending is not None
        if not pending.is_decided:
            pending.is_decided = self._rules.is_decided(
                self.newest, pending.agreement, pending.accepted_by
            )
        return pending.is_decided

    def adopt(self) -> None:
        """The decided proposal is the latest one from now on."""
        assert self.pending is not None
        self.newest, self.pending = self.pending.agreement, None
        self.voters = frozenset({voter.key for voter in self._rules.voters(self.newest)})

    def missing(self, pending: Proposal) -> list[str]:
        """The hosts of the voters of that list that have not accepted it."""
        voters = self._rules.voters(pending.agreement)
        return [each.host for each in voters if each.key not in pending.accepted_by]

    def _ask(self, pending: Proposal, now: float, *, is_first: bool) -> list[Action]:
        new = pending.agreement
        pending.asked_at = now
        old_voters = () if self.newest.number == BEFORE_ALL else self._rules.voters(self.newest)
        openers = new.members[:1] if new.runs else ()  # rank 0 opens the worker store
        asked = {each.key: each for each in (*old_voters, *self._rules.voters(new), *openers)}
        message = self._message(new, now)
        sent: list[Action] = []
        for key, member in asked.items():
            needs_store = member in openers and pending.store is None
            if is_first or needs_store or key not in pending.accepted_by:
                sent.append(SendMessage(to=key, at=member.endpoint, message=message))
        return sent

    def _message(self, agreement: Agreement, now: float) -> Propose:
        return Propose(ballot=self._ballot, stamp=now, agreement=agreement, decided=self.newest)
