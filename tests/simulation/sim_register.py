"""The ideal register: one record in memory with an atomic compare-and-set, always available.

It is for testing what is built on a register (leader, follower, rounds, leases) without its parts:
no ballot, no transaction, no revision. A claim holds until `valid_until`, in true time, counted
from its last renewal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from tests.simulation.sim_clock import SimClock, SimLoop
from tests.simulation.sim_keeper import SimKeeper, SimLink

from rallypoint.rendezvous.consensus.messages import (
    NO_BALLOT,
    Accepted,
    Agreement,
    Ballot,
    Led,
    Message,
    Over,
    Prepare,
    Promise,
    Propose,
    Refused,
    Setup,
)
from rallypoint.rendezvous.consensus.rules import KEEPER
from rallypoint.rendezvous.job.reports import Finish, Join
from rallypoint.rendezvous.job.round import Member
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRules
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer

_NEVER = float("-inf")


class IdealRules(KeyValueRules):
    """The rules for a register that is always available, so that only its own word counts."""

    def newest_word(
        self, held: Agreement, pending: Agreement | None, heard: Mapping[str, float]
    ) -> float:
        """The latest agreement that it confirmed."""
        return heard.get(KEEPER, _NEVER)


class SimRegister(SimKeeper):
    """The register: one record."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        super().__init__(loop, random)
        self.forget()

    def forget(self) -> None:
        self.ballot, self.leader = NO_BALLOT, Member(key="", host="", local_world_size=0)
        self.host = ""  # the key of the agent that began the job
        self.newest: Agreement | None = None
        self.valid_until = _NEVER

    def link(
        self,
        setup: Setup,
        clock: SimClock,
        answered: Callable[[list[Answer]], None],
        rules: type[KeyValueRules] = KeyValueRules,
    ) -> SimLink:
        return SimRegisterLink(self, setup, answered)

    def soon(self, event: Callable[[], None]) -> None:
        """Call `event` at the present time, but after the current event."""
        self._loop.after(0.0, event)

    def answer(self, setup: Setup, message: Message) -> Message | None:
        """The answer to that agent."""
        finish = None if self.newest is None else self.newest.finish
        match message:
            case Join():
                return self._tell(message, finish)
            case Prepare():
                return Over(finish=finish) if finish else self._claim(setup, message)
            case Propose(ballot=self.ballot):
                return self._write(setup, message)
            case Propose():
                return self._refused(message.ballot, None)
        return None

    def _tell(self, join: Join, finish: Finish | None) -> Message | None:
        if finish is not None:
            return Over(finish=finish) if join.job == self.host else None
        if not self.host:
            return None
        return Led(ballot=self.ballot, leader=self.leader, host=self.host, number=-1, round=-1)

    def _claim(self, setup: Setup, message: Prepare) -> Promise | Refused:
        me, is_mine = setup.me, message.ballot.candidate == self.ballot.candidate
        if not is_mine and self._loop.now < self.valid_until:
            return self._refused(message.ballot, self.leader)
        if self.newest is not None and self.newest.number > message.decided.number:
            return self._refused(message.ballot, None)
        if message.ballot < self.ballot:
            return self._refused(message.ballot, self.leader)
        was_lost = is_mine and self._loop.now < self.valid_until
        self.ballot, self.leader = message.ballot, me
        self.host = self.host or message.decided.host or me.key
        self._renew(setup)
        return Promise(
            ballot=message.ballot,
            voter=KEEPER,
            member=me,
            stamp=message.stamp,
            accepted=None,
            accepted_in=NO_BALLOT,
            was_lost=was_lost,
            is_trial=False,
        )

    def _write(self, setup: Setup, message: Propose) -> Accepted:
        new = message.agreement
        if self.newest is None or new.number > self.newest.number:
            self.newest = new
        self._renew(setup)
        return Accepted(ballot=message.ballot, voter=KEEPER, stamp=message.stamp, number=new.number)

    def _renew(self, setup: Setup) -> None:
        self.valid_until = self._loop.now + setup.fence_s * (1 + setup.drift)

    def _refused(self, ballot: Ballot, leader: Member | None) -> Refused:
        decided = None if leader is not None else self.newest
        return Refused(
            ballot=ballot, promised=self.ballot, job=self.host, leader=leader, decided=decided
        )


class SimRegisterLink(SimLink):
    """One agent's connection to the register."""

    def __init__(
        self, register: SimRegister, setup: Setup, answered: Callable[[list[Answer]], None]
    ) -> None:
        self._register, self._setup, self._answered = register, setup, answered

    def send(self, message: Message) -> None:
        """See SimLink. The answer comes once the agent has finished its current action."""
        self._register.soon(lambda: self._answer(message))

    def lost(self, key: str) -> None:
        """See SimLink. A claim lasts for its full time."""

    def close(self) -> None:
        """See SimLink."""

    def _answer(self, message: Message) -> None:
        answer = self._register.answer(self._setup, message)
        self._answered([] if answer is None else [answer])
