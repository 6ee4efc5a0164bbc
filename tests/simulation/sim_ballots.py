"""Ballots alone: production voters and campaigns, messages in any order, and no clock to help.

Leases keep most rivals apart, which hides whether ballots alone would. Here every candidate
proposes its own list, no voter is bound by time, and messages are delayed, lost and repeated at
random. Two different agreements with one number raise `ViolationError`.
"""

from __future__ import annotations

from random import Random

from tests.simulation.sim_witness import ViolationError

from rallypoint.rendezvous.consensus.ballot import Campaign
from rallypoint.rendezvous.consensus.messages import (
    Accepted,
    Agreement,
    Ballot,
    Message,
    Prepare,
    Promise,
    Propose,
    Refused,
    SendMessage,
    Setup,
)
from rallypoint.rendezvous.consensus.register import Voter
from rallypoint.rendezvous.consensus.rules import Rules
from rallypoint.rendezvous.job.gathering import Limits
from rallypoint.rendezvous.job.round import Endpoint, Member

_ENDPOINT = Endpoint(host="a", port=1)


class _Candidate:
    """One agent's attempt to lead, and what it then gets agreed on."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self.agreement = campaign.decided
        self.pending: Agreement | None = None
        self.accepted_by: set[str] = set()


class SimBallots:
    """Voters, and a set of messages in transit."""

    def __init__(self, seed: int, rules: type[Rules]) -> None:
        self.random = Random(f"ballots {seed}")
        self.seed, self.lines = seed, list[str]()
        self.decided: dict[int, Agreement] = {}
        names = "abcdef"[: self.random.randint(2, 6)]
        self._members = [Member(key=each, host=each, local_world_size=1) for each in names]
        self._setups = {
            each.key: Setup(me=each, run_id="job", limits=Limits(), endpoints=(_ENDPOINT,))
            for each in self._members
        }
        self._rules = rules(self._setups["a"])
        self._voters = {key: Voter(setup, self._rules) for key, setup in self._setups.items()}
        self._candidates: dict[str, _Candidate] = {}
        self._bag: list[tuple[str, str, Message]] = []  # from, to
        self._now, self._term = 0.0, 0
        first = Agreement(number=0, members=self._some(), host="a")
        self.decided[0] = first
        for member in first.members:
            self._voters[member.key].learn(first)

    def run(self, steps: int) -> None:
        """Let that many random events happen.

        Raises:
            ViolationError: there are two agreements with the same number.
        """
        for _ in range(steps):
            self._now += 1e6  # no voter is bound by time
            if not self._bag or self.random.random() < 0.03:
                self._campaign()
                continue
            i = self.random.randrange(len(self._bag))
            sender, to, message = self._bag[i]
            if self.random.random() < 0.95:  # otherwise it is delivered again later
                self._bag[i] = self._bag[-1]
                self._bag.pop()
            if self.random.random() < 0.95:
                self._deliver(sender, to, message)

    def _some(self) -> tuple[Member, ...]:
        count = self.random.randint(1, len(self._members))
        return tuple(self.random.sample(self._members, count))

    def _campaign(self) -> None:
        key = self.random.choice(sorted(self._voters))
        voter = self._voters[key]
        if not voter.has_vote() or voter.decided is None:
            return
        self._term += self.random.randint(0, 1)
        ballot = Ballot(self._term, key)
        if not voter.promised < ballot:
            return
        setup = self._setups[key]
        campaign = Campaign(setup, self._rules, ballot, voter.decided, self._now)
        self._candidates[key] = _Candidate(campaign)
        for send in campaign.in_earnest():
            assert isinstance(send, SendMessage)
            self._post(key, send.to, send.message)

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        voter, candidate = self._voters[to], self._candidates.get(to)
        match message:
            case Prepare():
                self._post(to, sender, voter.prepare(message, self._now))
            case Propose():
                if message.decided == message.agreement:
                    voter.learn(message.decided)
                else:
                    self._post(to, sender, voter.propose(message, self._now))
            case Refused(decided=decided) if decided is not None:
                voter.learn(decided)
                if candidate and decided.number > candidate.agreement.number:
                    del self._candidates[to]
            case Promise() if candidate and candidate.pending is None:
                candidate.campaign.promised(message, self._now)
                if candidate.campaign.won_at is not None:
                    self._propose(to, candidate, candidate.campaign.bound())
            case Accepted() if candidate and message.ballot == candidate.campaign.ballot:
                self._accepted(to, candidate, message)

    def _propose(self, key: str, candidate: _Candidate, bound: Agreement | None) -> None:
        number = candidate.agreement.number + 1
        because = f"{candidate.campaign.ballot}"
        own = Agreement(number=number, members=self._some(), because=because, host="a")
        candidate.pending, candidate.accepted_by = bound or own, set()
        propose = Propose(
            ballot=candidate.campaign.ballot,
            stamp=self._now,
            agreement=candidate.pending,
            decided=candidate.agreement,
        )
        voters = (candidate.agreement, candidate.pending)
        for each in {voter.key: voter for held in voters for voter in self._rules.voters(held)}:
            self._post(key, each, propose)

    def _accepted(self, key: str, candidate: _Candidate, message: Accepted) -> None:
        new = candidate.pending
        if new is None or message.number != new.number:
            return
        candidate.accepted_by.add(message.voter)
        if not self._rules.is_decided(candidate.agreement, new, candidate.accepted_by):
            return
        text = f"{new.number}: {' '.join(each.key for each in new.members)}"
        self.lines.append(f"in {candidate.campaign.ballot} {candidate.accepted_by} agree on {text}")
        if self.decided.setdefault(new.number, new) != new:
            story = "\n".join([*self.lines, "!! two agreements of one number"])
            raise ViolationError(f"ballots {self.seed}:\n{story}")
        candidate.agreement = new
        self._voters[key].learn(new)
        for each in self.random.sample(self._members, self.random.randint(0, 2)):
            again = Propose(
                ballot=candidate.campaign.ballot, stamp=self._now, agreement=new, decided=new
            )
            self._post(key, each.key, again)
        self._propose(key, candidate, None)

    def _post(self, sender: str, to: str, message: Message) -> None:
        self._bag.append((sender, to, message))
