"""A simulated keeper: slow, unavailable, or cut off from some agents.

    SimEtcd     transactions in order, revisions, leases
    SimStore    nothing but compare_set, each one a message of its own

It is harsher than real ones: a request whose answer is no longer awaited may still be carried out,
seconds later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import suppress
from random import Random
from typing import Any

from tests.simulation.sim_clock import SimClock, SimLoop

from rallypoint.rendezvous.consensus.messages import Message, Setup
from rallypoint.rendezvous.job.round import Endpoint
from rallypoint.rendezvous.keyvalue.keeper import (
    Grant,
    KeepAlive,
    Pair,
    Read,
    Request,
    Snapshot,
    Transact,
)
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRules
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer, KeyValueVoter, is_same
from rallypoint.rendezvous.keyvalue.store_client import OneValue, Swap

_PATIENCE_S = 2.0  # limit of the agents' client


class SimLink(ABC):
    """One agent's connection to a keeper."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message to the keeper."""

    @abstractmethod
    def lost(self, key: str) -> None:
        """An agent has been lost."""

    @abstractmethod
    def close(self) -> None:
        """The agent ends by itself, without waiting for answers."""


class SimKeeper(ABC):
    """Stores a cluster's agreements.

    Attributes:
        places: the endpoints that agents are given for it.
        min_delay_s, max_delay_s: of a message in one direction.
        is_away: whether it currently carries out nothing.
        cuts: the hosts from which it cannot be reached.
    """

    places: tuple[Endpoint, ...] = ()

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.min_delay_s, self.max_delay_s = 0.0005, 0.005
        self.is_away = False
        self.cuts: set[str] = set()
        self._loop, self._random = loop, random

    @abstractmethod
    def link(
        self,
        setup: Setup,
        clock: SimClock,
        answered: Callable[[list[Answer]], None],
        rules: type[KeyValueRules] = KeyValueRules,
    ) -> SimLink:
        """Connect an agent to it."""

    @abstractmethod
    def forget(self) -> None:
        """Lose all its data."""


class SimServer(SimKeeper):
    """A keeper that carries out requests, sooner or later."""

    def link(
        self,
        setup: Setup,
        clock: SimClock,
        answered: Callable[[list[Answer]], None],
        rules: type[KeyValueRules] = KeyValueRules,
    ) -> SimLink:
        return SimKeyValueLink(setup, clock, self, answered, rules)

    @abstractmethod
    def apply(self, request: Any) -> object:
        """Carry out a request now."""

    @abstractmethod
    def steps_of(self, value: OneValue, request: Request) -> Generator[Any, Any, object]:
        """The requests with which an agent's client (`OneValue`) fulfils this request."""

    def carry_out(
        self,
        host: str,
        request: Any,
        then: Callable[[object], None],
        lost: Callable[[], None],
    ) -> None:
        """Carry out a request and pass its answer to `then`, or eventually call `lost`."""
        random = self._random
        is_lost = self.is_away or host in self.cuts
        if is_lost and random.random() < 0.3:
            self._loop.after(random.uniform(0.0, 4.0), lambda: self.apply(request))
        if is_lost:
            self._loop.after(_PATIENCE_S, lost)
            return

        def arrive() -> None:
            if self.is_away:
                self._loop.after(_PATIENCE_S, lost)
                return
            result = self.apply(request)
            if host in self.cuts:
                self._loop.after(_PATIENCE_S, lost)
            else:
                self._loop.after(random.uniform(self.min_delay_s, self.max_delay_s), back(result))

        def back(result: object) -> Callable[[], None]:
            return lambda: then(result)

        self._loop.after(random.uniform(self.min_delay_s, self.max_delay_s), arrive)


class SimEtcd(SimServer):
    """A simulated etcd cluster."""

    places = (Endpoint(host="etcd", port=2379),)

    def __init__(self, loop: SimLoop, random: Random) -> None:
        super().__init__(loop, random)
        self.revision = 1
        self.pairs: dict[str, tuple[bytes, int, str]] = {}  # key -> value, revision, lease
        self._leases: dict[str, tuple[int, float]] = {}  # lease -> seconds, end

    def steps_of(self, value: OneValue, request: Request) -> Generator[Any, Any, object]:
        return (yield request)

    def forget(self) -> None:
        """See SimKeeper. Its revisions start again."""
        self.pairs.clear()
        self._leases.clear()
        self.revision = 1

    def apply(self, request: Request) -> object:
        self._expire()
        match request:
            case Read(prefix=prefix):
                found = [
                    Pair(key, value, revision)
                    for key, (value, revision, _) in sorted(self.pairs.items())
                    if key.startswith(prefix)
                ]
                return Snapshot(tuple(found), self.revision)
            case Grant(ttl_s=ttl_s):
                self.revision += 1
                lease = str((1 << 63) - self.revision)  # as large as etcd's
                self._leases[lease] = (ttl_s, self._loop.now + ttl_s)
                return lease
            case KeepAlive(lease=lease):
                if lease in self._leases:
                    ttl_s = self._leases[lease][0]
                    self._leases[lease] = (ttl_s, self._loop.now + ttl_s)
                return lease in self._leases
            case Transact(revisions=revisions, puts=puts, deletes=deletes):
                if any(self.pairs.get(key, (b"", 0))[1] != n for key, n in revisions.items()):
                    return None
                self.revision += 1
                for key, value in puts.items():
                    lease = request.leases.get(key, request.lease)
                    self.pairs[key] = (value, self.revision, lease)
                for key in deletes:
                    self.pairs.pop(key, None)
                return self.revision

    def _expire(self) -> None:
        over = {lease for lease, (_, end) in self._leases.items() if end <= self._loop.now}
        for lease in over:
            del self._leases[lease]
            for key in [k for k, (_, _, on) in self.pairs.items() if on == lease]:
                del self.pairs[key]


class SimStore(SimServer):
    """A simulated store, of which one key is used."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        super().__init__(loop, random)
        self.held = b""

    def steps_of(self, value: OneValue, request: Request) -> Generator[Any, Any, object]:
        match request:
            case Read(prefix=prefix):
                return (yield from value.read(prefix))
            case Transact():
                return (yield from value.transact(request))
            case Grant():
                return ""
            case KeepAlive():
                return True

    def forget(self) -> None:
        self.held = b""

    def apply(self, request: Swap) -> bytes:
        """See SimKeeper. This is a store's compare_set."""
        if request.expected and not self.held:
            return request.expected
        if request.expected == self.held:
            self.held = request.desired
        return self.held


class SimKeyValueLink(SimLink):
    """One agent's connection to the keeper: one message at a time, and of each kind only the
    latest.
    """

    def __init__(
        self,
        setup: Setup,
        clock: SimClock,
        keeper: SimServer,
        answered: Callable[[list[Answer]], None],
        rules: type[KeyValueRules],
    ) -> None:
        self._voter = KeyValueVoter(setup, rules)
        self._host = setup.me.host
        self._clock, self._keeper, self._answered = clock, keeper, answered
        self._value = OneValue()
        self._steps: Generator[Any, Any, object] | None = None
        self._waiting: dict[type, Message] = {}
        self._is_busy = False
        self._at_work: Message | None = None

    def send(self, message: Message) -> None:
        if not (self._is_busy and is_same(message, self._at_work)):
            self._waiting[type(message)] = message
        self._next()

    def lost(self, key: str) -> None:
        self._voter.lost(key)

    def close(self) -> None:
        request = self._voter.resign()
        if request is None:
            return
        steps = self._keeper.steps_of(OneValue(), request)

        def go_on(result: object) -> None:
            with suppress(StopIteration):
                self._keeper.carry_out(self._host, steps.send(result), go_on, lambda: None)

        go_on(None)

    def _next(self) -> None:
        while self._waiting and not self._is_busy:
            self._at_work = self._waiting.pop(next(iter(self._waiting)))
            self._work(self._voter.ask(self._at_work, self._clock.now()))

    def _work(self, request: Request | None) -> None:
        self._is_busy = request is not None
        if request is not None:
            self._steps = self._keeper.steps_of(self._value, request)
            self._go_on(None)
            return
        self._answered(self._voter.take())
        self._next()

    def _go_on(self, result: object) -> None:
        assert self._steps is not None
        try:
            asked = self._steps.send(result)
        except StopIteration as end:
            self._work(self._voter.go_on(end.value, self._clock.now()))
        else:
            self._keeper.carry_out(self._host, asked, self._go_on, self._lost)

    def _lost(self) -> None:
        self._voter.failed("nobody answered")
        self._work(None)
