"""A register that the agents keep themselves: a quorum of the last agreement's voters decides.

No agent promises while it follows a coordinator, so a claimant first asks whether it would be
promised (`Campaign.is_trial`). At the beginning the endpoints vote.
"""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.rendezvous.consensus.agreements import Agreements
from rallypoint.rendezvous.consensus.campaign import Campaign
from rallypoint.rendezvous.consensus.messages import Ballot, Setup
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rules import Rules
from rallypoint.rendezvous.job.round import Member


class PeerRegister(Register):
    """See Register."""

    has_rivals = True

    def __init__(self, setup: Setup, rules: type[Rules] = Rules) -> None:
        super().__init__(setup, rules(setup))

    def may_claim(self) -> bool:
        """See Register: a voter may."""
        return self.voter.has_vote()

    def heirs(self, told: Sequence[Member]) -> Sequence[Member]:
        assert self.voter.decided is not None
        return self.rules.heirs(self.voter.decided)

    def claim(self, ballot: Ballot, now: float) -> Campaign:
        assert self.voter.decided is not None
        return Campaign(self.setup, self.rules, ballot, self.voter.decided, now)

    def agreements(self, campaign: Campaign) -> Agreements:
        return Agreements(
            self.setup, self.rules, campaign.ballot, campaign.decided, campaign.slots()
        )
