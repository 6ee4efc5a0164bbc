"""A coordinator's orders: which round it told members to start, and which orders are unconfirmed.

A start order goes to members that have sent a heartbeat under this ballot, because it is valid for
a time after that heartbeat; the others get it after their first one. Each order is repeated until a
heartbeat shows that it was obeyed.
"""

from __future__ import annotations

from rallypoint.rendezvous.consensus.messages import Agreement, Ballot, Go, Halt
from rallypoint.rendezvous.job.reports import Start, Stop
from rallypoint.rendezvous.job.round import Endpoint, Member, Round


class Orders:
    """The orders of one ballot.

    Attributes:
        round: the latest one that this coordinator has told members to start; -1: none.
        old_round: the one that its predecessor may have; -1: none.
    """

    def __init__(self, ballot: Ballot) -> None:
        self.round = -1
        self.old_round = -1
        self._ballot = ballot
        self._orders: dict[str, Go] = {}
        self._sent_at = 0.0  # to all
        self._halt: Halt | None = None
        self._unsent: set[str] = set()  # members whose order waits for their first beat

    def begin(
        self, agreed: Agreement, store: Endpoint, voters: tuple[Member, ...], now: float
    ) -> tuple[str, ...]:
        """That round is agreed; returns the keys of members to tell."""
        opened = Round(number=agreed.round, members=agreed.members, store=store)
        keep = {member.key for member in agreed.members if member.taking_part > 0}
        self.round, self._sent_at = agreed.round, now
        self._orders = {
            key: Go(
                ballot=self._ballot,
                sent_at=0.0,
                lease_s=0.0,
                number=agreed.number,
                start=Start(
                    seat=seat,
                    because=agreed.because,
                    is_urgent=agreed.is_urgent,
                    may_replace=agreed.may_replace,
                    keeps=key in keep,
                ),
                voters=voters,
            )
            for key, seat in opened.seats().items()
        }
        self._unsent.clear()
        return tuple(self._orders)

    def put_off(self, key: str) -> None:
        """No heartbeat received yet."""
        self._unsent.add(key)

    def go(self, key: str, sent_at: float, lease_s: float) -> Go:
        """The order to that member, valid for this long after the heartbeat sent then."""
        self._unsent.discard(key)
        return self._orders[key].__replace__(sent_at=sent_at, lease_s=lease_s)

    def must_repeat(self, key: str, now: float, beat_s: float) -> bool:
        """Whether to repeat the order to a member whose heartbeat does not show it."""
        return key in self._unsent or now - self._sent_at > beat_s

    def halt_all(self, stop: Stop, now: float) -> Halt:
        """The order to all members to end the latest round."""
        self._sent_at = now
        return self.halt(stop)

    def halt(self, stop: Stop) -> Halt:
        """The order to one member to end a round; equal orders are the same object."""
        if self._halt is None or self._halt.stop != stop:
            self._halt = Halt(ballot=self._ballot, stop=stop)
        return self._halt

    def may_run(self, round_number: int) -> bool:
        """Whether any member was ever told to start it."""
        return round_number in (self.round, self.old_round)
