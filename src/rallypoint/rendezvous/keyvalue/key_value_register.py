"""A register that a keeper holds: it alone decides, and no agent is needed.

    decide        the keeper: one transaction, under the condition that no one else was promised
    take over     a member of the last agreement: once it has seen the coordinator write nothing
                  for fence_s, or its connection close; another agent: after outage_s
    continue      while the keeper, or else every member, has heard the coordinator within fence_s

Why it holds. An agent can take over only by a transaction which finds that the coordinator wrote
nothing since the candidate first saw its last write, fence_s or more before, by the candidate's own
clock. So what the keeper last confirmed to the coordinator is older than that, and its members'
leases are over. No clock of etcd is trusted, and none of its leases, which only clear away what is
left. While the keeper is away a coordinator may continue for outage_s, as long as every member
confirms to follow it: a member that confirms does not take over, and other agents wait longer.

An agent that no longer hears its coordinator, though the keeper may, checks there which agent
coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rallypoint.rendezvous.consensus.ballot import Agreements, Campaign
from rallypoint.rendezvous.consensus.messages import (
    Action,
    Agreement,
    Ballot,
    Prepare,
    SendMessage,
    Setup,
)
from rallypoint.rendezvous.consensus.register import Register, before_all
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, KEEPER, MAX_VOTERS, Rules
from rallypoint.rendezvous.job.round import Member

_NEVER = float("-inf")


class KeyValueRules(Rules):
    """What candidates, coordinators and members may do if a keeper decides."""

    keeper = "etcd"  # its name in messages

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        endpoints = ", ".join(map(str, setup.endpoints))
        host = f"{self.keeper} at {endpoints}" if endpoints else self.keeper
        self._keeper = Member(key=KEEPER, host=host, local_world_size=0)

    def voters(self, agreement: Agreement) -> tuple[Member, ...]:
        """The keeper, whatever was agreed."""
        return (self._keeper,)

    def is_quorum(self, agreement: Agreement, keys: Collection[str]) -> bool:
        """Whether the keeper is among them."""
        return KEEPER in keys

    def heirs(self, agreement: Agreement) -> tuple[Member, ...]:
        """The members, by rank, so that they do not all ask at once."""
        return () if agreement.number == BEFORE_ALL else agreement.members[:MAX_VOTERS]

    def newest_word(
        self, held: Agreement, pending: Agreement | None, heard: Mapping[str, float]
    ) -> float:
        """What the keeper confirmed; while it is unavailable, what all members have confirmed."""
        by_keeper = heard.get(KEEPER, _NEVER)
        members = held.members if pending is None else held.members + pending.members
        by_all = min([heard.get(each.key, _NEVER) for each in members], default=_NEVER)
        return max(by_keeper, min(by_all, by_keeper + outage_s(self.setup) - self.setup.fence_s))

    def needs_lease(self, *, is_alone: bool) -> bool:
        """Also for one node: any other one may take over."""
        return True

    # When a candidate may ask the keeper for a promise.

    def must_wait_s(self, leader: str, held: Agreement | None, lost: Collection[str]) -> float:
        """For how long a candidate must have seen the coordinator write nothing.

        Args:
            leader: the coordinator's key.
            held: the newest agreement; None: there is none, and so no worker runs.
            lost: agents whose connections with this one closed.
        """
        setup = self.setup
        keys = [] if held is None else [each.key for each in held.members]
        is_heir = setup.me.key in keys or all(key in lost for key in keys)
        if not is_heir:
            return outage_s(setup) * (1 + setup.drift)
        return 0.0 if leader in lost else setup.fence_s * (1 + setup.drift)


def outage_s(setup: Setup) -> float:
    """How long a coordinator whom all members hear continues without the keeper."""
    return max(setup.timeouts.outage_s, setup.fence_s)


class StoreRules(KeyValueRules):
    """The same with a store."""

    keeper = "the store"


class KeyValueRegister(Register):
    """One agent's end of it."""

    keeper_key = KEEPER

    def __init__(self, setup: Setup, rules: type[KeyValueRules] = KeyValueRules) -> None:
        super().__init__(setup, rules(setup))
        self.voter.learn(before_all(setup.endpoints))

    def leave_job(self) -> None:
        super().leave_job()
        self.voter.learn(before_all(self.setup.endpoints))

    def may_claim(self) -> bool:
        return True

    def heirs(self, announced: Sequence[Member]) -> Sequence[Member]:
        return announced

    def claim(self, ballot: Ballot, now: float) -> Campaign:
        decided = self.voter.decided
        assert decided is not None
        if not decided.host:
            decided = decided.__replace__(host=self.voter.job)  # otherwise it might begin a new one
        return _Claim(self.setup, self.rules, ballot, decided, now)

    def agreements(self, campaign: Campaign) -> Agreements:
        return _Agreements(self.setup, self.rules, campaign.ballot, campaign.decided, {})


class _Claim(Campaign):
    """The keeper can refuse without disturbance, so there is no trial."""

    is_trial = False

    def ask(self) -> list[Action]:
        prepare = Prepare(
            ballot=self.ballot, stamp=self._stamp, decided=self.decided, is_trial=False
        )
        return [SendMessage(to=KEEPER, at=None, message=prepare)]

    def text(self) -> str:
        return ""


class _Agreements(Agreements):
    """Written with one transaction each."""

    def renew(self, now: float) -> list[Action]:
        """See Agreements: with a heartbeat, or with what is being written."""
        pending = self.pending
        if self.newest.number == BEFORE_ALL:
            return []
        if pending is not None and KEEPER not in pending.accepted_by:
            return []  # it is asked anyway
        newest = self.newest if pending is None else pending.agreement
        return [SendMessage(to=KEEPER, at=None, message=self._message(newest, now))]

    def counted(self, known: Collection[str]) -> Collection[str]:
        """See Agreements: while the keeper is unavailable, every member decides."""
        return known
