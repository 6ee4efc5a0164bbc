"""A simulated network of agents: ordered connections, delays, losses, cut cables, dead processes.

Messages sent into a cut wait there, as in a TCP socket's buffer, and arrive when the cable is
repaired. The death of a process closes its connections, and the others learn of it, unless a cut
separates them. It is deliberately harsher than TCP: single messages get lost. A lasting cut breaks
connections only if `breaks_after_s` is set.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from random import Random

from tests.simulation.sim_clock import SimLoop

from rallypoint.rendezvous.consensus.messages import Accepted, Message, Prepare, Promise, Propose
from rallypoint.rendezvous.job.round import Endpoint

_VOTES = frozenset({Prepare, Promise, Propose, Accepted})


class Process(ABC):
    """The network's interface to an agent's process."""

    key: str
    host: str
    at: Endpoint
    is_alive: bool

    @abstractmethod
    def hear(self, sender: str, message: Message) -> None:
        """A message has arrived."""

    @abstractmethod
    def hear_closed(self, key: str) -> None:
        """A connection has closed."""

    @abstractmethod
    def hear_unreachable(self, at: Endpoint) -> None:
        """Nobody answers at that endpoint."""


class SimNetwork:
    """Delivers messages: who reaches whom, and when."""

    def __init__(self, loop: SimLoop, random: Random) -> None:
        self.loss = 0.0
        self.min_delay_s = 0.0002
        self.max_delay_s = 0.002
        # After a cut of this length, connections end on both sides.
        self.breaks_after_s: float | None = None
        self._loop = loop
        self._random = random
        self._by_key: dict[str, Process] = {}
        self._by_place: dict[Endpoint, Process] = {}
        self._links: dict[str, dict[str, None]] = {}  # sets, in a deterministic order
        self._arrival: dict[tuple[str, str], float] = {}
        self._cuts: set[tuple[str, str]] = set()  # pairs of hosts, in the direction of the message
        self._held: list[tuple[Process, Process, Message | None]] = []
        self._ambushes: list[tuple[int, Callable[[], object]]] = []
        self._votes = 0
        self._mended = 0  # the number of repairs

    def attach(self, process: Process) -> None:
        """Let a process listen."""
        self._by_key[process.key] = process
        self._by_place[process.at] = process
        self._links[process.key] = {}

    def send(self, sender: Process, to: str, at: Endpoint | None, message: Message) -> None:
        """Send a message over a connection, creating one if necessary."""
        if type(message) in _VOTES:
            self._count_vote()
        target = self._by_key.get(to)
        if target is None:
            return
        if to not in self._links[sender.key]:
            answers = None if at is None else self._by_place.get(at)
            if answers is None:
                return
            if answers.key != to:
                if answers.is_alive and not self._is_cut(sender, answers):
                    self._loop.after(self._delay_s(), lambda: sender.hear_closed(to))
                return
        self._carry(sender, target, message)

    def call(self, sender: Process, at: Endpoint, message: Message) -> None:
        """Send a message to whichever process is at that endpoint."""
        target = self._by_place.get(at)
        if target is None or not target.is_alive:
            self._loop.after(self._delay_s(), lambda: sender.hear_unreachable(at))
        elif target is not sender:
            self._carry(sender, target, message)

    def died(self, process: Process) -> None:
        """Close the connections of a dead process."""
        for key in self._links.pop(process.key):
            other = self._by_key[key]
            if key in self._links:
                self._links[key].pop(process.key, None)
            self._deliver(process, other, None)
        if self._by_place.get(process.at) is process:
            del self._by_place[process.at]

    def cut(self, senders: set[str], receivers: set[str]) -> None:
        """Drop everything from these hosts to those."""
        self._cuts.update((a, b) for a in senders for b in receivers if a != b)
        if self.breaks_after_s is not None:
            end = partial(self._break, frozenset(senders), frozenset(receivers), self._mended)
            self._loop.after(self.breaks_after_s, end)

    def _break(self, senders: frozenset[str], receivers: frozenset[str], mended: int) -> None:
        """Nothing has been acknowledged since the cut: both kernels end these connections."""
        if mended != self._mended:
            return
        ended: dict[tuple[str, str], None] = {}
        for key, others in self._links.items():
            for other in others if self._by_key[key].host in senders else ():
                if self._by_key[other].host in receivers:
                    ended.update({(key, other): None, (other, key): None})
        for key, other in ended:
            self._links[key].pop(other)
        waits, self._held = self._held, []
        for sender, target, message in waits:
            if {sender.host, target.host} & senders and {sender.host, target.host} & receivers:
                if message is None:  # from a process that has died meanwhile
                    ended[sender.key, target.key] = None
            else:
                self._held.append((sender, target, message))
        for key, other in ended:
            self._by_key[other].hear_closed(key)

    def ambush(self, votes: int, what: Callable[[], object]) -> None:
        """Call `what` just before that many votes, or requests for votes, have been sent."""
        self._ambushes.append((self._votes + votes, what))

    def _count_vote(self) -> None:
        self._votes += 1
        for ambush in [each for each in self._ambushes if each[0] <= self._votes]:
            self._ambushes.remove(ambush)
            ambush[1]()

    def calm(self) -> None:
        """Stop losses and planned ambushes."""
        self.loss = 0.0
        self._ambushes.clear()

    def mend(self, *, is_lost: bool = False) -> None:
        """Repair all cables; waiting messages arrive, unless `is_lost`."""
        self._cuts.clear()
        self._mended += 1
        held, self._held = self._held, []
        if is_lost:
            return
        for sender, target, message in held:
            self._deliver(sender, target, message)

    def _is_cut(self, a: Process, b: Process) -> bool:
        return bool(self._cuts) and (
            (a.host, b.host) in self._cuts or (b.host, a.host) in self._cuts
        )

    def _carry(self, sender: Process, target: Process, message: Message) -> None:
        if not target.is_alive:
            return
        if target.key not in self._links[sender.key]:
            if self._is_cut(sender, target):
                return  # no connection can be created
            self._links[sender.key][target.key] = None
            self._links[target.key][sender.key] = None
        if self.loss and self._random.random() < self.loss:
            return
        self._deliver(sender, target, message)

    def _deliver(self, sender: Process, target: Process, message: Message | None) -> None:
        if self._cuts and (sender.host, target.host) in self._cuts:
            self._held.append((sender, target, message))
            return
        way = (sender.key, target.key)
        arrival = max(self._loop.now + self._delay_s(), self._arrival.get(way, 0.0))
        self._arrival[way] = arrival

        def arrive() -> None:
            if self._cuts and (sender.host, target.host) in self._cuts:
                self._held.append((sender, target, message))
                return
            if not target.is_alive or target.key != way[1]:  # it may have been started again
                return
            if message is None:
                target.hear_closed(way[0])
            else:
                target.hear(way[0], message)

        self._loop.at(arrival, arrive)

    def _delay_s(self) -> float:
        return self._random.uniform(self.min_delay_s, self.max_delay_s)
