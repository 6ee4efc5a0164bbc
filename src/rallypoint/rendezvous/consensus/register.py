"""Where a job's agreements are recorded: all may read them, and one agent at a time may write.

    may_claim --claim--> `Campaign` --granted--> `Agreements`: append the next one, renew the claim
        ^                                              |
        +----another agent has claimed it since--------+

It is a register with compare-and-set: a write is valid only if no one has claimed the register
since, and only after the agreement that it was written to follow. A claim is valid for fence_s
after the last confirmation, counted from when that was *sent*; afterwards no worker may run under
its permission.

Subclasses keep it: the agents themselves (PeerRegister), or a key-value store
(keyvalue/key_value_register.py). Leader and follower are the same for all.

A vote belongs to one agent process: a restarted one has another key, and no vote. At an endpoint,
an agent that knows of no job votes with its endpoint's key on the first agreement. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from rallypoint.rendezvous.consensus.ballot import Agreements, Campaign
from rallypoint.rendezvous.consensus.messages import (
    NO_BALLOT,
    Accepted,
    Agreement,
    Ballot,
    OpenStore,
    Prepare,
    Promise,
    Propose,
    Refused,
    Setup,
)
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, Rules
from rallypoint.rendezvous.job.round import Endpoint, Member


class OwnStore:
    """The store of the coming round's workers, if this agent has its rank 0 and must open it.

    A proposal requests it; it is opened before the round is agreed, and its address is sent with
    the acceptance.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._round = -1
        self._endpoint: Endpoint | None = None
        self._proposal: Propose | None = None  # to be answered again once it is open

    def proposed(self, proposal: Propose, known: int) -> list[OpenStore]:
        """What to open for the proposed list; `known`: the latest decided agreement's number."""
        new = proposal.agreement
        if not new.runs or new.members[0].key != self._key:
            return []
        is_new = new.number > known and new.round != self._round
        if is_new:
            self._round, self._endpoint = new.round, None
        if new.round == self._round and self._endpoint is None:
            self._proposal = proposal
        return [OpenStore(round=new.round, members=new.members)] if is_new else []

    def with_store(self, answer: Accepted, new: Agreement) -> Accepted:
        """The acceptance of that list, with the store's address once it has one."""
        has_it = new.runs and new.round == self._round
        return answer.__replace__(store=self._endpoint) if has_it else answer

    def opened(self, round_number: int, endpoint: Endpoint) -> Propose | None:
        """It is open; returns the proposal to answer again, if there is one."""
        if round_number != self._round:
            return None
        self._endpoint = endpoint
        proposal, self._proposal = self._proposal, None
        return proposal


def slot_key(slot: int) -> str:
    """The key that votes for an endpoint, before there is a job."""
    return f"endpoint {slot}"


def before_all(endpoints: tuple[Endpoint, ...]) -> Agreement:
    """What the first agreement follows: a list of the endpoints."""
    return Agreement(
        number=BEFORE_ALL,
        members=tuple(
            [
                Member(key=slot_key(i), host=str(at), local_world_size=0)
                for i, at in enumerate(endpoints)
            ]
        ),
    )


class Voter:
    """Answers Prepare and Propose.

    Attributes:
        decided: the latest agreement that it knows to be decided; None: no job is known here.
        accepted: the latest that it accepted, in the ballot `accepted_in`.
        leader_key: the coordinator that it last heard.
        was_lost: whether that one's connection closed, so that our timeouts do not apply to it.
        left: jobs of this name that the agent has left, and in which it has no vote.
    """

    def __init__(self, setup: Setup, rules: Rules, left: frozenset[str] = frozenset()) -> None:
        self.promised = NO_BALLOT
        self.accepted: Agreement | None = None
        self.accepted_in = NO_BALLOT
        self.decided: Agreement | None = None
        self.leader_key = ""
        self.was_lost = False
        self.left = left
        self._me = setup.me
        self._slot = setup.slot
        self._rules = rules
        self._heard_at = float("-inf")
        self._known_job = ""
        if setup.slot is not None:
            self.decided = before_all(setup.endpoints)

    @property
    def number(self) -> int:
        """Of the latest decided agreement that it knows; lower than that of all endpoints: none."""
        return BEFORE_ALL - 1 if self.decided is None else self.decided.number

    @property
    def job(self) -> str:
        """The key of the agent that began the job that it knows of; empty: none."""
        return self._known_job if self.decided is None else self.decided.host or self._known_job

    def has_vote(self) -> bool:
        """Whether this agent votes on the next agreement that it knows of, or may ask to."""
        return self.decided is not None and self._vote_on(self.decided) != ""

    def heard(self, ballot: Ballot, now: float) -> None:
        """The coordinator of that ballot is alive, and has our promise."""
        self.promised = max(self.promised, ballot)
        self.leader_key = ballot.candidate
        self.was_lost = False
        self._heard_at = now

    def job_exists(self, job: str) -> None:
        """That job exists: at an endpoint, no other one may begin."""
        self._known_job = job

    def lost(self, key: str) -> None:
        """An agent has ended; if it coordinated, promises to it are void."""
        self.was_lost = self.was_lost or key == self.leader_key

    def prepare(self, message: Prepare, now: float) -> Promise | Refused:
        """Promise, or refuse with a reason."""
        theirs, ballot = message.decided, message.ballot
        if self._is_other_job(theirs) or self.number > theirs.number or self._is_bound(ballot, now):
            return self._refused(ballot)
        vote = self._vote_on(theirs)
        if not vote or not self._rules.may_promise(ballot, self.promised):
            return self._refused(ballot)
        if not message.is_trial:
            self.learn(theirs)
            self.promised = ballot
        return Promise(
            ballot=ballot,
            voter=vote,
            member=self._me,
            stamp=message.stamp,
            accepted=self.accepted,
            accepted_in=self.accepted_in,
            was_lost=not self._may_leave(now),
            is_trial=message.is_trial,
        )

    def propose(self, message: Propose, now: float) -> Accepted | Refused:
        """Accept, or refuse with a reason."""
        agreement, ballot = message.agreement, message.ballot
        # A candidate that again proposes what we know to be decided also asks us for the agreement
        # after it: but we may already have accepted another one, and it has not asked for that.
        is_late = agreement.number <= self.number and message.decided.number < agreement.number
        if self._is_other_job(agreement) or is_late or self._is_bound(ballot, now):
            return self._refused(ballot)
        if not self._rules.may_promise(ballot, self.promised):
            return self._refused(ballot)
        self.heard(ballot, now)
        self.learn(message.decided)
        if agreement.number > self.number:
            self.accepted, self.accepted_in = agreement, ballot
        return Accepted(
            ballot=ballot, voter=self._me.key, stamp=message.stamp, number=agreement.number
        )

    def decided_in(self, ballot: Ballot, number: int) -> None:
        """The proposal of that number in this ballot is decided."""
        accepted = self.accepted
        if accepted is not None and accepted.number == number and self.accepted_in == ballot:
            self.learn(accepted)

    def learn(self, agreement: Agreement) -> None:
        """That is decided."""
        if agreement is self.decided and self.accepted is None:
            return  # as nearly always
        if self._is_other_job(agreement):
            return
        if agreement.number > self.number:
            self.decided = agreement
        if self.accepted is not None and self.accepted.number <= self.number:
            self.accepted, self.accepted_in = None, NO_BALLOT

    def _is_other_job(self, agreement: Agreement) -> bool:
        if agreement.host in self.left:
            return True
        return agreement.host != "" and self.job not in ("", agreement.host)

    def _is_bound(self, ballot: Ballot, now: float) -> bool:
        """Whether we follow another coordinator, which may count on us."""
        if self.was_lost or ballot.candidate == self.leader_key:
            return False
        return not self._may_leave(now)

    def _may_leave(self, now: float) -> bool:
        return self._rules.may_leave(heard_for_s=now - self._heard_at)

    def _vote_on(self, agreement: Agreement) -> str:
        if agreement.number == BEFORE_ALL:
            begun = "" if self.accepted is None else self.accepted.host
            if self._slot is None or self._known_job not in ("", begun):
                return ""
            return slot_key(self._slot)
        keys = [voter.key for voter in self._rules.voters(agreement)]
        return self._me.key if self._me.key in keys else ""

    def _refused(self, ballot: Ballot) -> Refused:
        decided = self.decided
        has_job = decided is not None and decided.number > BEFORE_ALL
        return Refused(
            ballot=ballot,
            promised=self.promised,
            job=self.job,
            decided=decided if has_job else None,
        )


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
