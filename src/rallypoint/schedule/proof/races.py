"""Finds unordered accesses to the same chunk.

Receivers may read messages in the sender's memory ("zero copy"), so a chunk that is sent is being
read until its last receiver has received it. Only lanes and messages order accesses; waiting for a
slot does not, because an engine may have more slots.

    rank 0   send c ----.            write c      fine if the write comes after the taking, which
                         \\            ^           it does if a message (or several) lead from the
    rank 1                take ------/            one to the other
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rallypoint.schedule.execution import Trace
from rallypoint.schedule.program import Buffer, Chunks, Program, Send

Location = tuple[int, Buffer, int]  # rank, buffer, chunk

_TABLE = 50_000_000  # entries


class RaceKind(Enum):
    """The kinds of unordered accesses."""

    LANES = ", and nothing says which comes first"
    MESSAGE = ", and its receivers may still be reading"
    LATE = " later"


class Access(NamedTuple):
    """A read or write of one chunk.

    Attributes:
        event: the event that accesses it.
        ends: the events after which the access is over; for a send, those that receive the message.
        writes: whether it writes.
        is_input: whether it reads an input.
    """

    event: int
    ends: tuple[int, ...]
    writes: bool
    is_input: bool


Accesses = dict[Location, list[Access]]


class Race(NamedTuple):
    """Two accesses to a chunk, the second one a write."""

    location: Location
    other: Access
    write: Access
    kind: RaceKind


class Before(Protocol):
    """An order of events: which always come before which."""

    def before(self, first: int, second: int) -> bool:
        """Whether the first event always comes before the second one."""


class Clocks:
    """The order of events, whatever the timing, by vector clocks that are computed on demand.

    They are computed for all events at once while the table has only some megabytes; beyond that,
    for each event in question by following its causes.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._rows: NDArray[np.int32] | None = None
        self._single: dict[int, NDArray[np.int32]] = {}
        self.is_large = len(trace.events) * len(trace.lanes) > _TABLE
        self._by_lane: list[list[int]] = []

    def before(self, first: int, second: int) -> bool:
        """Whether the first event always comes before the second one."""
        one, other = self._trace.events[first], self._trace.events[second]
        if one.lane == other.lane:
            return one.clock < other.clock
        return bool(self.row(second)[one.lane] > one.clock)

    def row(self, event: int) -> NDArray[np.int32]:
        """For each lane, the number of its events that come before this one, or are this one."""
        if self.is_large:
            if event not in self._single:
                self._single[event] = self._follow(event)
            return self._single[event]
        if self._rows is None:
            self._rows = self._compute()
        row: NDArray[np.int32] = self._rows[event]
        return row

    def _compute(self) -> NDArray[np.int32]:
        rows = np.zeros((len(self._trace.events), len(self._trace.lanes)), np.int32)
        last = [-1] * len(self._trace.lanes)
        for number, event in enumerate(self._trace.events):
            row = rows[number]
            if last[event.lane] >= 0:
                row[:] = rows[last[event.lane]]
            for sending in event.takes:
                np.maximum(row, rows[sending], out=row)
            row[event.lane] = event.clock + 1
            last[event.lane] = number
        return rows

    def _follow(self, event: int) -> NDArray[np.int32]:
        """Compute one row: follow an event back through the messages that it and its predecessors
        received.
        """
        events = self._trace.events
        if not self._by_lane:
            self._by_lane = [[] for _ in self._trace.lanes]
            for number, each in enumerate(events):
                self._by_lane[each.lane].append(number)
        row = np.zeros(len(self._trace.lanes), np.int32)
        pending = [event]
        while pending:
            each = events[pending.pop()]
            seen = int(row[each.lane])
            if each.clock < seen:
                continue
            row[each.lane] = each.clock + 1
            for number in self._by_lane[each.lane][seen : each.clock + 1]:
                pending += events[number].takes
        return row


def accesses(trace: Trace) -> Accesses:
    """All accesses by chunk, in the order of the trace; for pieces after the first, only those to
    scratch memory.
    """
    found: defaultdict[Location, list[Access]] = defaultdict(list)

    def note(rank: int, chunks: Chunks, access: Access) -> None:
        buffer, first = chunks.buffer, chunks.index
        for index in range(first, first + chunks.count):
            found[rank, buffer, index].append(access)

    for number, event in enumerate(trace.events):
        rank, operation = trace.lanes[event.lane][0], event.operation
        is_first = event.piece == 0
        if isinstance(operation, Send):
            source = operation.source
            if is_first or source.buffer is Buffer.SCRATCH:
                ends = tuple(trace.takers.get(number, ()))
                note(rank, source, Access(number, ends, False, source.buffer is Buffer.INPUT))
            continue
        for operand in operation.operands:
            if isinstance(operand, Chunks) and (is_first or operand.buffer is Buffer.SCRATCH):
                is_input = operand.buffer is Buffer.INPUT
                note(rank, operand, Access(number, (number,), False, is_input))
        for target in operation.targets:
            if is_first or target.buffer is Buffer.SCRATCH:
                note(rank, target, Access(number, (number,), True, False))
    return found


def in_place(program: Program, trace: Trace, found: Accesses) -> Accesses:
    """The accesses to chunks that are both input and output, as outputs."""
    shared = {}
    for rank in range(trace.ranks):
        alias = program.collective.alias(rank, is_root=rank == program.root)
        if alias is None:
            continue
        for chunk in range(program.chunks):
            source = (rank, Buffer.INPUT, alias[0] * program.chunks + chunk)
            target = (rank, Buffer.OUTPUT, alias[1] * program.chunks + chunk)
            both = sorted((*found.get(source, ()), *found.get(target, ())))
            numbers = [access.event for access in both]
            copies = {n for n in numbers if numbers.count(n) > 1 and is_copy(trace, n)}
            shared[target] = [access for access in both if access.event not in copies]
    return shared


def is_copy(trace: Trace, event: int) -> bool:
    """Whether an event only copies; in place, where its source is its target, it has no effect."""
    operation = trace.events[event].operation
    return not isinstance(operation, Send) and len(operation.operands) == 1


def races(trace: Trace, clocks: Before, found: Accesses) -> Iterator[Race]:
    """Unordered pairs of accesses to a chunk, at least one of them a write.

    Order is transitive, so each access is compared only with those since the last write.
    """
    for location, row in found.items():
        write: Access | None = None
        reads: list[Access] = []
        for access in row:
            if not access.writes:
                if write is not None and write.event != access.event:
                    if not clocks.before(write.event, access.event):
                        yield Race(location, access, write, RaceKind.LANES)
                    elif access.is_input:
                        yield Race(location, access, write, RaceKind.LATE)
                reads.append(access)
                continue
            for other in (*reads, write) if write is not None else reads:
                kind = _conflict(clocks, other, access)
                if kind is not None:
                    yield Race(location, other, access, kind)
            write, reads = access, []


def _conflict(clocks: Before, other: Access, write: Access) -> RaceKind | None:
    if other.event == write.event:
        return None
    if not clocks.before(other.event, write.event):
        return RaceKind.LANES
    if other.ends == (other.event,):
        return None
    return None if all(clocks.before(end, write.event) for end in other.ends) else RaceKind.MESSAGE
