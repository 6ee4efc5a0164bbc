"""Where a job's agreements are recorded: all may read them, and one agent at a time may write.

    may_claim --claim--> `Campaign` --granted--> `Agreements`: append the next one, renew the claim
        ^                                              |
        +----another agent has claimed it since--------+

It is a register with compare-and-set: a write is valid only if nobody has claimed the register
since, and only after the agreement that it was written to follow. A claim is valid for fence_s
after the last confirmation, counted from when that was *sent*; afterwards nobody may run by its
permission.

Subclasses keep it: the agents themselves (PeerRegister), or a key-value store
(keyvalue/key_value_register.py). Leader and follower are the same for all. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rallypoint.rendezvous.consensus.ballot import Agreements, Campaign
from rallypoint.rendezvous.consensus.messages import Ballot, Setup
from rallypoint.rendezvous.consensus.rules import Rules
from rallypoint.rendezvous.consensus.voter import Voter
from rallypoint.rendezvous.job.round import Member


class Register(ABC):
    """One agent's end of it.

    Attributes:
        voter: what this agent knows of it, and has promised.
        keeper_key: of the voter that is not an agent, and that all believe; empty: there is none,
            so simultaneous claimants hinder each other.
    """

    keeper_key = ""

    def __init__(self, setup: Setup, rules: Rules) -> None:
        self.setup, self.rules = setup, rules
        self.voter = Voter(setup, rules)

    def leave_job(self) -> None:
        """Another job of that name continues; in the one known so far this agent has no part."""
        left = self.voter.left | {self.voter.job}
        self.voter = Voter(self.setup.__replace__(slot=None), self.rules, left)

    # To claim it.

    @abstractmethod
    def may_claim(self) -> bool:
        """Whether this agent can get it, as far as it knows."""

    @abstractmethod
    def heirs(self, announced: Sequence[Member]) -> Sequence[Member]:
        """The agents that may claim it next, in turn; `announced`: the last coordinator's."""

    @abstractmethod
    def claim(self, ballot: Ballot, now: float) -> Campaign:
        """Claim it."""

    # To write.

    @abstractmethod
    def agreements(self, campaign: Campaign) -> Agreements:
        """It was granted: its agreements."""


class PeerRegister(Register):
    """A register that the agents keep themselves: a quorum of the last agreement's voters decides.

    No agent promises while it follows a coordinator, so a claimant first asks whether it would be
    promised (`Campaign.is_trial`). At the beginning the endpoints vote.
    """

    def __init__(self, setup: Setup, rules: type[Rules] = Rules) -> None:
        super().__init__(setup, rules(setup))

    def may_claim(self) -> bool:
        """A voter may."""
        return self.voter.has_vote()

    def heirs(self, announced: Sequence[Member]) -> Sequence[Member]:
        assert self.voter.decided is not None
        return self.rules.heirs(self.voter.decided)

    def claim(self, ballot: Ballot, now: float) -> Campaign:
        assert self.voter.decided is not None
        return Campaign(self.setup, self.rules, ballot, self.voter.decided, now)

    def agreements(self, campaign: Campaign) -> Agreements:
        return Agreements(
            self.setup, self.rules, campaign.ballot, campaign.decided, campaign.slots()
        )
