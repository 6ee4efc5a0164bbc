"""Runs all lanes of a program with few slots, and records the order of operations.

A lane waits while `slots` of its messages have not been received. Each lane waits for particular
messages and slots only, so the order in which lanes are run does not matter: if one run ends, every
run ends, and if one run deadlocks, every run does.

The contents of messages are not examined here; see proof/verify.py.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rallypoint.schedule.program import (
    Operation,
    Program,
    ProgramError,
    Send,
    error_at,
    incoming,
    position_of,
)


class Event(NamedTuple):
    """One operation of one piece.

    Attributes:
        lane: an index into Trace.lanes.
        clock: the index of the event in its lane.
        takes: the events of the sends whose messages it receives, in the order of the operands.
    """

    lane: int
    clock: int
    piece: int
    step: int
    operation: Operation
    takes: tuple[int, ...]


@dataclass(slots=True)
class Trace:
    """One possible order of all events.

    Attributes:
        lanes: by lane, (rank, number of the lane).
        events: all events, in this order.
        takers: for each event that is a send, the events that received its message. If some ranks
            represent all, events of other ranks are numbered as in symmetry.TurnedClocks.
        ranks: the number of ranks that were run.
    """

    lanes: list[tuple[int, int]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    takers: dict[int, list[int]] = field(default_factory=dict)
    ranks: int = 0


def execute(program: Program, *, slots: int, pieces: int, ranks: int = 0) -> Trace:
    """Run `pieces` pieces.

    Args:
        ranks: run only this many ranks, which represent all others (see symmetry.py); 0 for all.
    """
    machine = _Machine(program, slots, pieces, ranks or program.ranks)
    machine.run()
    machine.check_finished()
    if machine.trace.ranks < program.ranks:
        machine.number_takers()
    return machine.trace


class _Machine:
    def __init__(self, program: Program, slots: int, pieces: int, ranks: int) -> None:
        self.trace = Trace(ranks=ranks)
        self._program = program
        self._slots, self._pieces = slots, pieces
        self._lanes: list[tuple[Operation, ...]] = []
        for rank in range(ranks):
            for number, lane in enumerate(program.lanes(rank)):
                self.trace.lanes.append((rank, number))
                self._lanes.append(lane)
        self._ids = {key: lane for lane, key in enumerate(self.trace.lanes)}
        self._routes: dict[tuple[int, int], int] = {}  # (sending lane, receiving rank) -> number
        self._mail: list[deque[tuple[int, int]]] = []  # by route: (message, event of its send)
        self._taker: list[int] = []  # by route: the receiving lane, or -1
        self._sender: list[int] = []  # by route
        # By lane and step: the routes of its messages.
        self._by_step = [self._compile(lane) for lane in range(len(self._lanes))]
        count = len(self._lanes)
        self._step, self._piece, self._clock = [0] * count, [0] * count, [0] * count
        self._untaken: list[list[int]] = [[] for _ in range(count)]  # by lane and message

    def _compile(self, lane: int) -> list[tuple[int, ...]]:
        """For each operation of a lane, the routes of its messages."""
        return [
            tuple(self._route(lane, receiver) for receiver in operation.to)
            if isinstance(operation, Send)
            else tuple(self._receiving_routes(lane, step))
            for step, operation in enumerate(self._lanes[lane])
        ]

    def _receiving_routes(self, lane: int, step: int) -> Iterator[int]:
        rank = self.trace.lanes[lane][0]
        for message in incoming(self._lanes[lane][step]):
            # The peer's representative is run instead of it; from there, this rank is as far in the
            # other direction.
            peer = message.peer
            like = peer % self.trace.ranks
            sender = self._ids.get((like, message.lane))
            if sender is None:
                raise self._error(lane, step, f"rank {peer} has no lane {message.lane}")
            route = self._route(sender, (rank + like - peer) % self._program.ranks)
            taker = self._taker[route]
            if taker not in (-1, lane):
                raise self._error(
                    lane,
                    step,
                    f"lane {self.trace.lanes[taker][1]} takes messages of lane "
                    f"{message.lane} of rank {peer} too; one lane must take them all",
                )
            self._taker[route] = lane
            yield route

    def _route(self, sender: int, receiver: int) -> int:
        route = self._routes.setdefault((sender, receiver), len(self._mail))
        if route == len(self._mail):
            self._mail.append(deque())
            self._taker.append(-1)
            self._sender.append(sender)
        return route

    def run(self) -> None:
        """Run all lanes until none can advance."""
        ready = deque(range(len(self._lanes)))
        is_ready = [True] * len(self._lanes)
        while ready:
            lane = ready.popleft()
            is_ready[lane] = False
            for woken in self._advance(lane):
                if not is_ready[woken]:
                    is_ready[woken] = True
                    ready.append(woken)

    def _advance(self, lane: int) -> set[int]:
        """Run a lane as far as possible; returns the lanes that may now advance."""
        operations, by_step = self._lanes[lane], self._by_step[lane]
        events, mail = self.trace.events, self._mail
        step, piece, clock = self._step[lane], self._piece[lane], self._clock[lane]
        woken: set[int] = set()
        while piece < self._pieces and operations:
            operation, routes = operations[step], by_step[step]
            if isinstance(operation, Send):
                if self._slot_holder(lane) is not None:
                    break
                letter = (len(self._untaken[lane]), len(events))
                self._untaken[lane].append(len(routes))
                for route in routes:
                    mail[route].append(letter)
                    woken.add(self._taker[route])
                events.append(Event(lane, clock, piece, step, operation, ()))
            else:
                if self._missing(routes) is not None:
                    break
                takes = []
                for route in routes:
                    message, sending = mail[route].popleft()
                    takes.append(sending)
                    sender = self._sender[route]
                    self._untaken[sender][message] -= 1
                    woken.add(sender)
                    self.trace.takers.setdefault(sending, []).append(len(events))
                events.append(Event(lane, clock, piece, step, operation, tuple(takes)))
            clock += 1
            step += 1
            if step == len(operations):
                step, piece = 0, piece + 1
        self._step[lane], self._piece[lane], self._clock[lane] = step, piece, clock
        woken.discard(-1)
        return woken

    def _missing(self, routes: tuple[int, ...]) -> int | None:
        """A route on which an operation needs more messages than have been sent."""
        for route in routes:
            if not self._mail[route]:
                return route
        for route, count in Counter(routes).items() if len(set(routes)) < len(routes) else ():
            if len(self._mail[route]) < count:
                return route
        return None

    def _slot_holder(self, lane: int) -> int | None:
        """The message of a lane that must be received before it can send another."""
        message = len(self._untaken[lane]) - self._slots
        return message if message >= 0 and self._untaken[lane][message] else None

    def check_finished(self) -> None:
        """Raise ProgramError unless every operation was run and every message received."""
        for lane, operations in enumerate(self._lanes):
            if operations and self._piece[lane] < self._pieces:
                raise self._deadlock(lane)
        for (sender, receiver), route in self._routes.items():
            if self._mail[route]:
                raise self._never_taken(sender, receiver, self._mail[route][0][1])

    def number_takers(self) -> None:
        """Number the receivers so that other ranks are distinguished from their representatives."""
        ranks, count = self.trace.ranks, len(self.trace.events)
        lanes = {route: key for key, route in self._routes.items()}
        takers: dict[int, list[int]] = {}
        queues: dict[int, deque[int]] = {}
        for number, event in enumerate(self.trace.events):
            for route in self._by_step[event.lane][event.step]:
                if isinstance(event.operation, Send):
                    queues.setdefault(route, deque()).append(number)
        for number, event in enumerate(self.trace.events):
            if not isinstance(event.operation, Send):
                for route in self._by_step[event.lane][event.step]:
                    times = lanes[route][1] // ranks
                    takers.setdefault(queues[route].popleft(), []).append(number + times * count)
        self.trace.takers = takers

    def _deadlock(self, lane: int) -> ProgramError:
        """Describe a deadlock: follow who waits for whom until the chain closes, or ends at a rank
        that never comes.
        """
        chain: list[int] = []
        while lane not in chain:
            chain.append(lane)
            step = self._step[lane]
            if isinstance(self._lanes[lane][step], Send):
                holder = self._slot_holder(lane)
                receiver, route = next(
                    (receiver, route)
                    for (sender, receiver), route in self._routes.items()
                    if sender == lane and any(number == holder for number, _ in self._mail[route])
                )
                taker = self._taker[route]
                if taker < 0 or self._is_done(taker):
                    sending = next(e for number, e in self._mail[route] if number == holder)
                    return self._never_taken(lane, receiver, sending)
                lane = taker
                continue
            missing = self._missing(self._by_step[lane][step])
            assert missing is not None, "a lane that misses nothing can run"
            sender = self._sender[missing]
            if self._is_done(sender):
                rank, number = self.trace.lanes[sender]
                text = f"rank {rank}, lane {number} never sends what is taken here"
                return self._error(lane, step, text)
            lane = sender
        cycle = chain[chain.index(lane) :]
        waits = ", ".join(self._position(member, self._step[member]) for member in cycle)
        return self._error(lane, self._step[lane], f"these wait for each other: {waits}")

    def _is_done(self, lane: int) -> bool:
        return not self._lanes[lane] or self._piece[lane] == self._pieces

    def _never_taken(self, sender: int, receiver: int, event: int) -> ProgramError:
        step = self.trace.events[event].step
        return self._error(sender, step, f"rank {receiver} never takes this message")

    def _position(self, lane: int, step: int) -> str:
        rank, number = self.trace.lanes[lane]
        operation = self._lanes[lane][step]
        return position_of(rank=rank, lane=number, step=step, operation=operation)

    def _error(self, lane: int, step: int, text: str) -> ProgramError:
        rank, number = self.trace.lanes[lane]
        operation = self._lanes[lane][step]
        return error_at(self._program, text, rank=rank, lane=number, step=step, operation=operation)
