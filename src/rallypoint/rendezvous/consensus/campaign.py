"""A candidate: it asks all voters of the latest agreement that it knows for one ballot.

Only counts; participant.py decides when to start a campaign, and with which term.
"""

from __future__ import annotations

from rallypoint.rendezvous.consensus.messages import (
    Action,
    Agreement,
    Ballot,
    Call,
    Prepare,
    Promise,
    SendMessage,
    Setup,
)
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, Rules
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
            ballot=self.ballot,
            stamp=self._stamp,
            decided=self.decided,
            is_trial=self.is_trial,
        )
        if self.decided.number == BEFORE_ALL:
            return [
                SendMessage(to=self._setup.me.key, at=None, message=prepare)
                if slot == self._setup.slot
                else Call(at=endpoint, message=prepare)
                for slot, endpoint in enumerate(self._setup.endpoints)
            ]
        return [
            SendMessage(
                to=each.key, at=Endpoint(host=each.address, port=each.port), message=prepare
            )
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
        """What the winner must propose first; a job begins with those who agreed to it."""
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
        absent = ", ".join([voter.host for voter in self.missing()][:16])
        here = len(voters) - len(self.missing())
        what = "endpoints" if self.decided.number == BEFORE_ALL else "last agreed members"
        tie = ""
        if 2 * here == len(voters):
            tie = f"; of two equal halves, the one with {voters[0].host} goes on"
        return f"{here} of {len(voters)} {what} here, too few to continue{tie}; missing {absent}"
