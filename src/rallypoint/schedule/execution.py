"""Runs all lanes of a program with few slots, and records the order of operations.

A lane waits while `slots` of its messages have not been received. Each lane waits for particular
messages and slots only, so the order in which lanes are run does not matter: if one run ends, every
run ends, and if one run deadlocks, every run does.

The contents of messages are not examined here; see verify.py.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rallypoint.schedule.program import (
    Incoming,
    Operation,
    Program,
    ProgramError,
    Send,
    describe,
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
        self._all_ranks = program.ranks
        self._name = program.name
        self._slots, self._pieces = slots, pieces
        self._lanes: list[tuple[Operation, ...]] = []
        for rank in range(ranks):
            for number, lane in enumerate(program.lanes(rank)):
                self.trace.lanes.append((rank, number))
                self._lanes.append(lane)
        self._ids = {place: lane for lane, place in enumerate(self.trace.lanes)}
        self._routes: dict[tuple[int, int], int] = {}  # (sending lane, receiving rank) -> number
        self._mail: list[deque[tuple[int, int]]] = []  # by route: (message, event of its send)
        self._taker: list[int] = []  # by route: the receiving lane, or -1
        self._sender: list[int] = []  # by route
        self._ways = [self._compile(lane) for lane in range(len(self._lanes))]
        count = len(self._lanes)
        self._step, self._piece, self._clock = [0] * count, [0] * count, [0] * count
        self._untaken: list[list[int]] = [[] for _ in range(count)]  # by lane and message

    def _compile(self, lane: int) -> list[tuple[int, ...]]:
        """For each operation of a lane, the routes of its messages."""
        rank = self.trace.lanes[lane][0]
        ways = []
        for step, operation in enumerate(self._lanes[lane]):
            if isinstance(operation, Send):
                ways.append(tuple(self._route(lane, receiver) for receiver in operation.to))
                continue
            routes = []
            for operand in operation.operands:
                if not isinstance(operand, Incoming):
                    continue
                # The peer's representative is run in its place; from there, this rank is as far in
                # the other direction.
                like = operand.peer % self.trace.ranks
                receiver = (rank + like - operand.peer) % self._all_ranks
                sender = self._ids.get((like, operand.lane))
                if sender is None:
                    raise self._error(lane, step, f"rank {operand.peer} has no lane {operand.lane}")
                route = self._route(sender, receiver)
                taker = self._taker[route]
                if taker not in (-1, lane):
                    raise self._error(
                        lane,
                        step,
                        f"lane {self.trace.lanes[taker][1]} takes messages of lane "
                        f"{operand.lane} of rank {operand.peer} too; one lane must take them all",
                    )
                self._taker[route] = lane
                routes.append(route)
            ways.append(tuple(routes))
        return ways

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
        operations, ways = self._lanes[lane], self._ways[lane]
        events, mail = self.trace.events, self._mail
        step, piece, clock = self._step[lane], self._piece[lane], self._clock[lane]
        woken: set[int] = set()
        while piece < self._pieces and operations:
            operation, routes = operations[step], ways[step]
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
            for route in self._ways[event.lane][event.step]:
                if isinstance(event.operation, Send):
                    queues.setdefault(route, deque()).append(number)
        for number, event in enumerate(self.trace.events):
            if not isinstance(event.operation, Send):
                for route in self._ways[event.lane][event.step]:
                    times = lanes[route][1] // ranks
                    takers.setdefault(queues[route].popleft(), []).append(number + times * count)
        self.trace.takers = takers

    def _deadlock(self, lane: int) -> ProgramError:
        """Describe a deadlock: follow who waits for whom until the chain closes, or ends at a rank
        that never comes.
        """
        way: list[int] = []
        while lane not in way:
            way.append(lane)
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
            missing = self._missing(self._ways[lane][step])
            assert missing is not None, "a lane that misses nothing can run"
            sender = self._sender[missing]
            if self._is_done(sender):
                rank, number = self.trace.lanes[sender]
                text = f"rank {rank}, lane {number} never sends what is taken here"
                return self._error(lane, step, text)
            lane = sender
        cycle = way[way.index(lane) :]
        waits = ", ".join(self._place(member, self._step[member]) for member in cycle)
        return self._error(lane, self._step[lane], f"these wait for each other: {waits}")

    def _is_done(self, lane: int) -> bool:
        return not self._lanes[lane] or self._piece[lane] == self._pieces

    def _never_taken(self, sender: int, receiver: int, event: int) -> ProgramError:
        step = self.trace.events[event].step
        return self._error(sender, step, f"rank {receiver} never takes this message")

    def _place(self, lane: int, step: int) -> str:
        rank, number = self.trace.lanes[lane]
        return f"rank {rank}, lane {number}, step {step} ({describe(self._lanes[lane][step])})"

    def _error(self, lane: int, step: int, text: str) -> ProgramError:
        rank, number = self.trace.lanes[lane]
        message = f"{self._name}: {self._place(lane, step)}: {text}"
        chunk = chunk_of(self._lanes[lane][step])
        return ProgramError(message, rank=rank, lane=number, step=step, chunk=chunk)


def chunk_of(operation: Operation) -> int | None:
    """The first chunk that an operation uses."""
    if isinstance(operation, Send):
        return operation.source.index
    return operation.targets[0].index if operation.targets else None
