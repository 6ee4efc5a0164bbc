"""The definition of simulated time: walks through the operations one by one, as they can run.

An operation begins when the previous one in its lane has ended, its messages have arrived and, for
a send, a slot is free. Nothing else delays it, so that no clock or queue is needed.

Folding: if the ranks r and r + period do the same, they do it at the same times, and only the ranks
below `period` are walked. A message from rank p is then a message of rank p % period, identified by
the distance from its sender to its receiver.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field

from rallypoint.schedule.cost.links import Links
from rallypoint.schedule.cost.simulation.prices import Pieces, reduce_price, send_price
from rallypoint.schedule.program import Operation, Program, ProgramError, Send, incoming

Route = tuple[int, int, int]  # sender (below the period), its lane, distance to the receiver


def walk(program: Program, pieces: Pieces, links: Links, *, period: int = 0) -> list[float]:
    """The time at which each rank (below `period`; all, unless given) ends, in microseconds."""
    return _Walker(program, pieces, links, period or program.ranks).run()


@dataclass(slots=True)
class _Step:
    """An operation of a lane: its duration, what it sends and what it needs."""

    busy_us: float
    sends: list[tuple[Route, float]] = field(default_factory=list)  # with the delay until arrival
    takes: list[Route] = field(default_factory=list)
    is_send: bool = False


@dataclass(slots=True)
class _Message:
    """One message: the ranks that have yet to receive it, and when the last receiver so far did."""

    untaken: int
    taken_us: float = 0.0


class _Lane:
    def __init__(self, rank: int, steps: list[_Step]) -> None:
        self.rank, self.steps, self.now_us = rank, steps, 0.0
        self.step, self.piece = 0, 0
        self.sent: list[_Message] = []


class _Walker:
    def __init__(self, program: Program, pieces: Pieces, links: Links, period: int) -> None:
        self._program, self._pieces, self._links = program, pieces, links
        self._period = period
        self._mail: defaultdict[Route, deque[tuple[float, _Message]]] = defaultdict(deque)

    def run(self) -> list[float]:
        lanes = [
            _Lane(rank, [self._step(rank, number, each) for each in lane])
            for rank in range(self._period)
            for number, lane in enumerate(self._program.lanes(rank))
        ]
        active = [lane for lane in lanes if lane.steps]
        while active:
            moved = [self._advance(lane) for lane in active]
            active = [lane for lane in active if lane.piece < self._pieces.number]
            if active and not any(moved):
                raise ProgramError(f"{self._program.name}: lanes wait for each other", rank=0)
        ends = [0.0] * self._period
        for lane in lanes:
            ends[lane.rank] = max(ends[lane.rank], lane.now_us)
        return ends

    def _step(self, rank: int, number: int, operation: Operation) -> _Step:
        size = self._pieces.chunk_bytes
        if isinstance(operation, Send):
            busy, arrivals = send_price(self._links, rank, operation)
            routes = [self._route(rank, number, receiver) for receiver in operation.to]
            delays = [arrival.at(size) for arrival in arrivals]
            return _Step(busy.at(size), sends=list(zip(routes, delays, strict=True)), is_send=True)
        busy = reduce_price(self._links, rank, operation)
        takes = [self._route(each.peer, each.lane, rank) for each in incoming(operation)]
        return _Step(busy.at(size), takes=takes)

    def _route(self, sender: int, lane: int, receiver: int) -> Route:
        return sender % self._period, lane, (receiver - sender) % self._program.ranks

    def _advance(self, lane: _Lane) -> bool:
        """Run a lane as far as possible; returns whether it advanced at all."""
        moved = False
        while lane.piece < self._pieces.number:
            step = lane.steps[lane.step]
            if not (self._send(lane, step) if step.is_send else self._take(lane, step)):
                break
            moved = True
            lane.step += 1
            if lane.step == len(lane.steps):
                lane.step, lane.piece = 0, lane.piece + 1
        return moved

    def _send(self, lane: _Lane, step: _Step) -> bool:
        begin_us = lane.now_us
        if len(lane.sent) >= self._links.slots:
            oldest = lane.sent[-self._links.slots]
            if oldest.untaken:
                return False
            begin_us = max(begin_us, oldest.taken_us)
        message = _Message(len(step.sends))
        lane.sent.append(message)
        for route, delay_us in step.sends:
            self._mail[route].append((begin_us + delay_us, message))
        lane.now_us = begin_us + step.busy_us
        return True

    def _take(self, lane: _Lane, step: _Step) -> bool:
        if not all(self._mail[route] for route in step.takes):
            return False
        arrived = [self._mail[route].popleft() for route in step.takes]
        begin_us = max((at_us for at_us, _ in arrived), default=0.0)
        lane.now_us = max(lane.now_us, begin_us) + step.busy_us
        for _, message in arrived:
            message.untaken -= 1
            message.taken_us = max(message.taken_us, lane.now_us)
        return True
