"""The rules of a job whose agreements a keeper holds: it alone decides, and no agent is needed.

    decide        the keeper: one transaction, under the condition that nobody else was promised
    take over     a member of the last agreement: once it has seen the coordinator write nothing
                  for fence_s, or its connection close; another agent: after outage_s
    go on         while the keeper, or else every member, has heard the coordinator within fence_s

Why it holds. An agent can take over only by a transaction which finds that the coordinator wrote
nothing since the candidate first saw its last write, fence_s or more before, by the candidate's own
clock: so what the keeper last confirmed to the coordinator is older than that, and its members'
leases are over. No clock of etcd is trusted, and none of its leases, which only clear away what is
left. While the keeper is away a coordinator may go on for outage_s, as long as every member
confirms to follow it: a member that confirms does not take over, and other agents wait longer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rallypoint.rendezvous.consensus.messages import Agreement, Setup
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, KEEPER, MAX_VOTERS, Rules
from rallypoint.rendezvous.job.round import Member

_NEVER = float("-inf")


class KeyValueRules(Rules):
    """What candidates, coordinators and members may do if a keeper decides."""

    keeper = "etcd"  # its name in messages

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        places = ", ".join(map(str, setup.endpoints))
        host = f"{self.keeper} at {places}" if places else self.keeper
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
    """How long a coordinator whom all members hear goes on without the keeper."""
    return max(setup.timeouts.outage_s, setup.fence_s)


class StoreRules(KeyValueRules):
    """The same with a store."""

    keeper = "the store"
