"""An agent without a coordinator: whom it asks, when it campaigns, what it reports, when it gives
up.

    lost, or just started --- its turn ---> asks, or campaigns --- again, ever later ---> gives up

The heirs, those who may coordinate next (register.py), take turns in their order; pauses grow and
differ, so that rivals seldom meet. participant.py decides whether an agent may campaign at all, and
what a won campaign means.
"""

from __future__ import annotations

from random import Random

from rallypoint.rendezvous.consensus.ballot import Campaign
from rallypoint.rendezvous.consensus.follower import Follower
from rallypoint.rendezvous.consensus.messages import Action, Ballot, Call, Promise, SendMessage
from rallypoint.rendezvous.consensus.peers import EndedAgents
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL
from rallypoint.rendezvous.job.coordinator import next_notice
from rallypoint.rendezvous.job.reports import Finish, Notice, Outcome
from rallypoint.rendezvous.job.round import Endpoint

_STAGGER_S = 0.05  # between candidates, in the order of the members
_RETRY_S = 0.2  # doubled up to a heartbeat
_SEEK_S = 0.5
_FIRST_PAUSE_S = 0.02  # doubled up to that: when nodes start together, some find nobody yet
_HOPELESS = 3  # tries
_ASK = 3  # voters at a time: thousands may search at once, and each voter would be asked by all


class Search:
    """From the loss of one coordinator until the next one is heard.

    Attributes:
        campaign: this agent's own, if it has begun one.
        act_at: when to ask or campaign again; None: not before a message comes.
        why: what went wrong last.
    """

    def __init__(
        self, register: Register, follower: Follower, random: Random, gone: EndedAgents
    ) -> None:
        self.campaign: Campaign | None = None
        self.act_at: float | None = None
        self.why = "no node has answered yet"
        self._setup, self._register, self._follower = register.setup, register, follower
        self._random, self._gone = random, gone
        self._term = 0  # the highest one seen
        self._tries = 0
        self._pause_s = _FIRST_PAUSE_S
        self._since = 0.0
        self._notice_at = 0.0

    def begin(self, now: float) -> None:
        """There is no coordinator from now on."""
        self.campaign = None
        self._since, self._notice_at = now, next_notice(now, now)
        self._tries, self._pause_s = 0, _FIRST_PAUSE_S

    def begin_again(self, now: float) -> None:
        """For another job."""
        self.campaign = None
        self._since = self.act_at = now

    @property
    def wake_at(self) -> float:
        """When something is due at the latest."""
        over_at = min(self._notice_at, self._since + self._setup.timeouts.join_timeout_s)
        return over_at if self.act_at is None else min(over_at, self.act_at)

    # What it says.

    def end(self, now: float) -> Finish | None:
        """Whether it gives up."""
        waited_s = now - self._since
        if waited_s < self._setup.timeouts.join_timeout_s:
            return None
        because = f"{self._text()}, after {waited_s:.0f} s"
        return Finish(outcome=Outcome.GIVEN_UP, because=because)

    def notice(self, now: float) -> list[Action]:
        """A message for the user, from time to time."""
        if now < self._notice_at:
            return []
        self._notice_at = next_notice(self._since, now)
        return [Notice(f"waiting for {now - self._since:.0f} s so far: {self._text()}")]

    def _text(self) -> str:
        text = "" if self.campaign is None else self.campaign.text()
        return text or f"no coordinator found ({self.why})"

    # What it does.

    def is_due(self, now: float) -> bool:
        """Whether to ask or campaign now."""
        return self.act_at is not None and now >= self.act_at

    def saw(self, ballot: Ballot) -> None:
        """That campaign was begun."""
        self._term = max(self._term, ballot.term)

    def take_turn(self, now: float, *, was_leading: bool) -> None:
        """Campaign once those before us in the list have had their chance.

        No agent promises before the last coordinator's lease is over, unless it has ended; an agent
        that has just failed to coordinate lets others try first.
        """
        keys = [heir.key for heir in self._register.heirs(self._follower.voters)]
        before = keys[: keys.index(self._setup.me.key)] if self._setup.me.key in keys else []
        count = sum(key not in self._gone for key in before)
        was_lost = self._register.voter.was_lost
        wait_s = 0.0 if was_lost else self._setup.fence_s * self._setup.drift
        turn_s = wait_s + count * _STAGGER_S + self._random.uniform(0, _STAGGER_S / 5)
        self.act_at = now + turn_s + (_RETRY_S if was_leading else 0.0)

    def ask(self) -> list[Action]:
        """Ask any agent that may know of a coordinator."""
        join = self._follower.join()
        asked: list[Action] = [Call(at=at, message=join) for at in self._setup.to_call]
        me, gone = self._setup.me.key, self._gone
        others = [each for each in self._follower.voters if each.key != me and each.key not in gone]
        for voter in self._random.sample(others, min(len(others), _ASK)):
            asked.append(SendMessage(to=voter.key, at=voter.endpoint, message=join))
        return asked

    def unreachable(self, at: Endpoint, why: str, now: float, *, is_seeking: bool) -> None:
        """No agent is there, at least not yet."""
        self.why = f"{at}: {why}"
        if is_seeking and self.act_at is not None:
            self.act_at = min(self.act_at, now + self._pause_s)
            self._pause_s = min(2 * self._pause_s, _SEEK_S)

    def act(self, now: float, *, is_candidate: bool) -> list[Action]:
        """Ask or, as a candidate, campaign."""
        if not is_candidate:
            self.act_at = now + _SEEK_S
            return self.ask()
        self._tries += 1
        term = max(self._term, self._register.voter.promised.term) + 1
        self.campaign = self._register.claim(Ballot(term, self._setup.me.key), now)
        wait_s = min(_RETRY_S * 2**self._tries, self._setup.timeouts.heartbeat_s)
        self.act_at = now + wait_s * self._random.uniform(1, 2)
        asked = self.campaign.ask()
        if self._tries > _HOPELESS:  # there may be another job, or this one may continue without us
            asked += self.ask()
        return asked

    def promised(self, message: Promise, now: float) -> list[Action]:
        """A voter promises in our campaign."""
        campaign = self.campaign
        if campaign is None:
            return []
        campaign.promised(message, now)
        if campaign.won_at is None:
            return []
        if campaign.is_trial:
            self.saw(campaign.ballot)
            return campaign.in_earnest()
        self.act_at = now
        if campaign.decided.number == BEFORE_ALL and not campaign.is_unanimous:
            # The agents that begin a job together are its first voters: more of them are better.
            self.act_at = campaign.won_at + self._setup.timeouts.heartbeat_s
        return []

    def won(self, now: float) -> Campaign | None:
        """Our campaign, if it is won and no further vote can come."""
        campaign = self.campaign
        is_won = campaign is not None and campaign.won_at is not None and not campaign.is_trial
        return campaign if is_won and self.is_due(now) else None

    def pause_as_candidate(self, now: float) -> None:
        """The pause before it campaigns among others than those that it asked."""
        self.campaign = None
        self.act_at = now
        if not self._register.keeper_key:
            self.act_at += self._random.uniform(0, _RETRY_S)
