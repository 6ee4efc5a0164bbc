"""A register that a key-value store keeps: it alone grants claims; what it has written is decided.

An agent that no longer hears its coordinator, though the keeper may, checks there who coordinates.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rallypoint.rendezvous.consensus.ballot import Agreements, Campaign
from rallypoint.rendezvous.consensus.messages import Action, Ballot, Prepare, SendMessage, Setup
from rallypoint.rendezvous.consensus.register import Register
from rallypoint.rendezvous.consensus.rules import BEFORE_ALL, KEEPER
from rallypoint.rendezvous.consensus.voter import before_all
from rallypoint.rendezvous.job.reports import Join
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.keyvalue.key_value_rules import KeyValueRules


class KeyValueRegister(Register):
    """See Register."""

    def __init__(self, setup: Setup, rules: type[KeyValueRules] = KeyValueRules) -> None:
        super().__init__(setup, rules(setup))
        self.voter.learn(before_all(setup.endpoints))
        self._looked_at = float("-inf")

    def leave_job(self) -> None:
        super().leave_job()
        self.voter.learn(before_all(self.setup.endpoints))

    def may_claim(self) -> bool:
        return True

    def heirs(self, told: Sequence[Member]) -> Sequence[Member]:
        return told

    def claim(self, ballot: Ballot, now: float) -> Campaign:
        decided = self.voter.decided
        assert decided is not None
        if not decided.host:
            decided = decided.__replace__(host=self.voter.job)  # otherwise it might begin a new one
        return _Claim(self.setup, self.rules, ballot, decided, now)

    def looks_at(self, heard_at: float) -> float | None:
        beat_s = self.setup.timeouts.beat_s
        return max(self._looked_at, heard_at + beat_s) + beat_s

    def look(self, join: Join, now: float) -> list[Action]:
        self._looked_at = now
        return [SendMessage(to=KEEPER, at=None, message=join)]

    def is_kept_by(self, key: str) -> bool:
        return key == KEEPER

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
