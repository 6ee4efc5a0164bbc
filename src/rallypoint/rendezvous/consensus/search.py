"""An agent without a coordinator: whom it asks, when it campaigns, what it says, when it gives up.

    lost, or just started --- its turn ---> asks, or campaigns --- again, ever later ---> gives up

The heirs, those who may coordinate next (rules.py), take turns in their order; pauses grow and
differ, so that rivals seldom meet. Whether an agent may campaign at all, and what a won campaign
means, is participant.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from rallypoint.rendezvous.consensus.campaign import Campaign
from rallypoint.rendezvous.consensus.ended_agents import EndedAgents
from rallypoint.rendezvous.consensus.messages import Action, Ballot, Call, Send
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.job.coordinator import NOTICE_EVERY_S
from rallypoint.rendezvous.job.reports import Finish, Join, Notice, Outcome
from rallypoint.rendezvous.job.round import Endpoint, Member

_STAGGER_S = 0.05  # between candidates, in the order of the members
_RETRY_S = 0.2  # doubled up to a beat
_SEEK_S = 0.5
_ASK = 3  # voters at a time: thousands may seek at once, and each voter would hear of all


class Search:
    """From the loss of one coordinator until the next one is heard.

    Attributes:
        campaign: this agent's own, if it has begun one.
        act_at: when to ask or campaign again; None: not before something comes.
        why: what went wrong last.
    """

    def __init__(self, register: Register, random: Random, gone: EndedAgents) -> None:
        self.campaign: Campaign | None = None
        self.act_at: float | None = None
        self.why = "nobody has answered yet"
        self._setup, self._register, self._random = register.setup, register, random
        self._gone = gone
        self._tries = 0
        self._since = 0.0
        self._notice_at = 0.0

    def begin(self, now: float) -> None:
        """There is no coordinator from now on."""
        self.campaign = None
        self._since, self._notice_at = now, now + NOTICE_EVERY_S
        self._tries = 0

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
        """What to tell the user, now and then."""
        if now < self._notice_at:
            return []
        self._notice_at = now + NOTICE_EVERY_S
        return [Notice(f"waiting for {now - self._since:.0f} s so far: {self._text()}")]

    def _text(self) -> str:
        text = "" if self.campaign is None else self.campaign.text()
        return text or f"no coordinator found ({self.why})"

    # What it does.

    def is_due(self, now: float) -> bool:
        """Whether to ask or campaign now."""
        return self.act_at is not None and now >= self.act_at

    def take_turn(self, heirs: Sequence[Member], *, waits: bool, late_s: float, now: float) -> None:
        """Campaign once those before us in the list have had their chance.

        Args:
            waits: whether nobody may promise before the time of the last coordinator is over.
            late_s: to be added.
        """
        keys = [heir.key for heir in heirs]
        before = keys[: keys.index(self._setup.me.key)] if self._setup.me.key in keys else []
        count = sum(key not in self._gone for key in before)
        wait_s = self._setup.fence_s * self._setup.drift if waits else 0.0
        turn_s = wait_s + count * _STAGGER_S + self._random.uniform(0, _STAGGER_S / 5)
        self.act_at = now + turn_s + late_s

    def ask(self, join: Join, voters: Sequence[Member]) -> list[Action]:
        """Whoever may know of a coordinator."""
        asked: list[Action] = [
            Call(at=endpoint, message=join)
            for slot, endpoint in enumerate(self._setup.endpoints)
            if slot != self._setup.slot
        ]
        me, gone = self._setup.me.key, self._gone
        others = [voter for voter in voters if voter.key != me and voter.key not in gone]
        for voter in self._random.sample(others, min(len(others), _ASK)):
            at = Endpoint(host=voter.address, port=voter.port)
            asked.append(Send(to=voter.key, at=at, message=join))
        return asked

    def pause(self, now: float) -> None:
        """Before it asks again."""
        self.act_at = now + _SEEK_S

    def pause_as_candidate(self, now: float) -> None:
        """Before it campaigns among others than those whom it asked."""
        self.campaign = None
        self.act_at = now
        if self._register.has_rivals:
            self.act_at += self._random.uniform(0, _RETRY_S)

    def run(self, ballot: Ballot, now: float) -> list[Action]:
        """Campaign."""
        self._tries += 1
        self.campaign = self._register.claim(ballot, now)
        wait_s = min(_RETRY_S * 2**self._tries, self._setup.timeouts.beat_s)
        self.act_at = now + wait_s * self._random.uniform(1, 2)
        return self.campaign.ask()

    @property
    def is_hopeless(self) -> bool:
        """Whether there may be another job, or one that goes on without us."""
        return self._tries > 3

    @staticmethod
    def late_s(*, was_leading: bool) -> float:
        """Who has just failed to coordinate leaves it to others first."""
        return _RETRY_S if was_leading else 0.0
