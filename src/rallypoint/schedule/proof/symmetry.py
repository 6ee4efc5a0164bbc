"""Programs in which each rank does what the one `period` before it does, turned.

    rank 0        send input 0 to 1         input 3 + from 3 -> output 3        a ring of 4
    rank 1        send input 1 to 2         input 0 + from 0 -> output 0        that, turned by 1

If so, a run in which all ranks take each step together is one possible run, and its result for the
first `period` ranks holds for all: the message that arrives from a peer is the one that this rank
(or its equivalent) sent to the rank at the same distance on the other side, turned. So a proof
needs the operations of a few ranks only: `Rotation` says how chunks turn, execution.py runs those
ranks alone, and verify.py checks them. Collectives with a root are excluded: no other rank is like
the root.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rallypoint.schedule.execution import Trace
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Lane,
    Operation,
    Program,
    Send,
    incoming,
    transformed,
)
from rallypoint.schedule.proof.races import Accesses

SAMPLED_OPERATIONS = 100_000  # operations of the ranks that are compared with their representatives
_TABLE = 50_000_000  # entries in the table of clocks


@dataclass(frozen=True, slots=True)
class Rotation:
    """How chunks of a rank correspond to those of the rank `period` further on.

    Attributes:
        shift: the distance by which a block's chunks turn.
        compared: how many ranks were found to correspond.
    """

    program: Program
    period: int
    shift: int
    compared: int = 0

    @property
    def times(self) -> int:
        """The number of turns after which everything is where it was."""
        return self.program.ranks // self.period

    def index(self, buffer: Buffer, index: int, times: int) -> int:
        """The index of a chunk after this many turns."""
        if buffer is Buffer.SCRATCH:
            return index
        program = self.program
        is_input = buffer is Buffer.INPUT
        blocks = program.input_blocks(0) if is_input else program.output_blocks(0)
        block, chunk = divmod(index, program.chunks)
        if blocks == program.ranks:
            block = (block + self.period * times) % blocks
        return block * program.chunks + (chunk + self.shift * times) % program.chunks

    def bits(self, ranks: int, times: int) -> int:
        """A set of ranks, as bits, after this many turns."""
        count = self.program.ranks
        by = self.period * times % count
        return (ranks << by | ranks >> (count - by)) & ((1 << count) - 1)

    def operation(self, operation: Operation, times: int) -> Operation:
        """An operation after this many turns. Chunks that are then no neighbours begin at -1, which
        no program has.
        """

        def turned(chunks: Chunks) -> Chunks:
            first = self.index(chunks.buffer, chunks.index, times)
            last = self.index(chunks.buffer, chunks.index + chunks.count - 1, times)
            is_whole = last - first == chunks.count - 1
            return Chunks(chunks.buffer, first if is_whole else -1, chunks.count)

        count, by = self.program.ranks, self.period * times
        return transformed(operation, chunks=turned, peer=lambda rank: (rank + by) % count)


def find_rotation(program: Program) -> Rotation | None:
    """How the program's ranks turn, or None if some of those compared differ.

    All ranks are compared if they are few; otherwise the last one and a random sample, the same
    each time.
    """
    period, ranks = program.period, program.ranks
    is_barrier = program.collective is Collective.BARRIER
    if not period or ranks % period or period == ranks or is_barrier:
        return None
    if not program.collective.waits_for_all or program.restartable:
        return None
    first = program.lanes(0)
    shift = _shift(program, first, program.lanes(period))
    most = max(16, SAMPLED_OPERATIONS // max(1, sum(map(len, first))))
    others: Collection[int] = range(period, ranks)
    if len(others) > most:
        chosen = random.Random(ranks).sample(range(period, ranks), most)
        others = {*range(period, 2 * period), ranks - 1, *chosen}
    turn = Rotation(program, period, shift, compared=len(others))
    for rank in sorted(others):
        times, like = divmod(rank, period)
        turned = tuple(
            tuple(turn.operation(each, times) for each in lane) for lane in program.lanes(like)
        )
        if turned != program.lanes(rank):
            return None
    return turn


def _shift(program: Program, one: Iterable[Lane], other: Iterable[Lane]) -> int:
    """The shift of the first chunk whose position within its block differs."""
    for lane, turned in zip(one, other, strict=False):
        for here, there in zip(_chunks_of(lane), _chunks_of(turned), strict=False):
            if here.buffer is not Buffer.SCRATCH:
                return (there.index - here.index) % program.chunks
    return 0


def _chunks_of(lane: Lane) -> Iterable[Chunks]:
    for operation in lane:
        if isinstance(operation, Send):
            yield operation.source
        else:
            yield from (each for each in operation.operands if isinstance(each, Chunks))
            yield from operation.targets


class TurnedClocks:
    """The equivalent of races.Clocks for a trace of ranks that represent all.

    An event of another rank has the number of its representative's event, plus the number of all
    events for each turn between the two. Rows are kept only for events that are asked about.
    """

    def __init__(self, trace: Trace, turn: Rotation, found: Accesses) -> None:
        self._trace, self._turn = trace, turn
        self._rows: dict[int, NDArray[np.int32]] = {}
        self._work_out(_asked(trace, found))

    def before(self, first: int, second: int) -> bool:
        """Whether the first event always comes before the second one, which is of a rank that was
        run.
        """
        times, number = divmod(first, len(self._trace.events))
        one, other = self._trace.events[number], self._trace.events[second]
        if times == 0 and one.lane == other.lane:
            return one.clock < other.clock
        return bool(self._rows[second][times, one.lane] > one.clock)

    def _work_out(self, asked: set[int]) -> None:
        """Compute rows from the first event to the last; those that are not asked for are soon
        dropped.
        """
        events, lanes = self._trace.events, len(self._trace.lanes)
        last = [np.zeros((self._turn.times, lanes), np.int32) for _ in range(lanes)]
        letters: dict[int, _Letter] = {}  # by the event of the send
        for number, event in enumerate(events):
            row = last[event.lane]
            for sending, message in zip(event.takes, incoming(event.operation), strict=True):
                letter = letters[sending]
                _raise_to(row, letter.row, message.peer // self._turn.period)
                letter.untaken -= 1
                if letter.untaken == 0:
                    del letters[sending]
            row[0, event.lane] = event.clock + 1
            if isinstance(event.operation, Send):
                takers = self._trace.takers.get(number, ())
                letters[number] = _Letter(row.copy(), len(takers))
            if number in asked:
                self._rows[number] = row.copy()


@dataclass(slots=True)
class _Letter:
    """What the sender of a message knew, and how many ranks have yet to receive it."""

    row: NDArray[np.int32]
    untaken: int


def _raise_to(row: NDArray[np.int32], other: NDArray[np.int32], times: int) -> None:
    """Raise a row to what a peer that many turns further on knew."""
    count = len(row)
    np.maximum(row[times:], other[: count - times], out=row[times:])
    if times:
        np.maximum(row[:times], other[count - times :], out=row[:times])


def _asked(trace: Trace, found: Accesses) -> set[int]:
    """The events whose predecessors the search for races may ask for."""
    asked: set[int] = set()
    for row in found.values():
        lanes = {trace.events[access.event].lane for access in row}
        for access in row:
            if access.writes or len(lanes) > 1:
                asked.add(access.event)
    return asked


def sample(trace: Trace, turn: Rotation, found: Accesses) -> Accesses:
    """As many accessed chunks as there is memory for their clocks, at random but the same each
    time.
    """
    entries = turn.times * len(trace.lanes)
    locations = list(found)
    random.Random(turn.program.ranks).shuffle(locations)
    chosen: Accesses = {}
    events = 0
    for location in locations:
        events += len(_asked(trace, {location: found[location]}))
        if events * entries > _TABLE and chosen:
            break
        chosen[location] = found[location]
    return chosen
