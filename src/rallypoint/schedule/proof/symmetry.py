"""Programs in which each rank does what the one `period` before it does, turned.

    rank 0        send input 0 to 1         input 3 + from 3 -> output 3        a ring of 4
    rank 1        send input 1 to 2         input 0 + from 0 -> output 0        that, turned by 1

If so, a run in which all ranks take each step together is one possible run, and its result for the
first `period` ranks holds for all: the message that arrives from a peer is the one that this rank
(or its equivalent) sent to the rank at the same distance on the other side, turned. So a proof
needs the operations of a few ranks only: `Rotation` says how places turn, execution.py runs those
ranks alone, and verify.py checks them. Collectives with a root are excluded: no other rank is like
the root.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rallypoint.schedule.execution import Trace
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Operation,
    Program,
    Reduce,
    Send,
)
from rallypoint.schedule.proof.races import Accesses

SAMPLED_OPERATIONS = 100_000  # operations of the ranks that are compared with their representatives
_TABLE = 50_000_000  # entries in the table of clocks


@dataclass(frozen=True, slots=True)
class Rotation:
    """How places of a rank correspond to those of the rank `period` further on.

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
        """The index of a chunk after so many turns."""
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
        """A set of ranks, as bits, after so many turns."""
        count = self.program.ranks
        by = self.period * times % count
        return (ranks << by | ranks >> (count - by)) & ((1 << count) - 1)

    def operation(self, operation: Operation, times: int) -> Operation | None:
        """An operation after so many turns; None if its neighbouring chunks are then not
        neighbours.
        """
        count, by = self.program.ranks, self.period * times

        def place(chunks: Chunks) -> Chunks:
            first = self.index(chunks.buffer, chunks.index, times)
            last = self.index(chunks.buffer, chunks.index + chunks.count - 1, times)
            if last - first != chunks.count - 1:
                raise _TornError
            return Chunks(chunks.buffer, first, chunks.count)

        def operand(value: Chunks | Incoming) -> Chunks | Incoming:
            if isinstance(value, Incoming):
                return Incoming((value.peer + by) % count, value.lane)
            return place(value)

        try:
            if isinstance(operation, Send):
                to = tuple((receiver + by) % count for receiver in operation.to)
                return Send(place(operation.source), to)
            operands = tuple(operand(each) for each in operation.operands)
            return Reduce(operands, tuple(place(each) for each in operation.targets))
        except _TornError:
            return None


class _TornError(Exception):
    """Neighbouring chunks are not neighbours after a turn."""


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
    others = range(period, ranks)
    if len(others) > most:
        chance = random.Random(ranks)
        others_chosen = {*range(period, 2 * period), ranks - 1, *chance.sample(others, most)}
    else:
        others_chosen = set(others)
    turn = Rotation(program, period, shift, compared=len(others_chosen))
    for rank in sorted(others_chosen):
        times, like = divmod(rank, period)
        if not _is_turned(turn, program.lanes(like), program.lanes(rank), times):
            return None
    return turn


def _shift(
    program: Program, one: Iterable[tuple[Operation, ...]], other: Iterable[tuple[Operation, ...]]
) -> int:
    """The shift of the first chunk whose position within its block differs."""
    for lane, turned in zip(one, other, strict=False):
        for here, there in zip(_places(lane), _places(turned), strict=False):
            if here.buffer is not Buffer.SCRATCH:
                return (there.index - here.index) % program.chunks
    return 0


def _places(lane: Iterable[Operation]) -> Iterable[Chunks]:
    for operation in lane:
        if isinstance(operation, Send):
            yield operation.source
        else:
            yield from (each for each in operation.operands if isinstance(each, Chunks))
            yield from operation.targets


def _is_turned(
    turn: Rotation,
    lanes: tuple[tuple[Operation, ...], ...],
    turned: tuple[tuple[Operation, ...], ...],
    times: int,
) -> bool:
    return len(lanes) == len(turned) and all(
        len(one) == len(other)
        and all(turn.operation(a, times) == b for a, b in zip(one, other, strict=True))
        for one, other in zip(lanes, turned, strict=True)
    )


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
        letters: dict[int, list[object]] = {}  # by the event of a send: its row, and who waits
        for number, event in enumerate(events):
            row = last[event.lane]
            if event.takes:
                peers = [
                    operand.peer
                    for operand in getattr(event.operation, "operands", ())
                    if isinstance(operand, Incoming)
                ]
                for sending, peer in zip(event.takes, peers, strict=True):
                    times = peer // self._turn.period
                    _raise_to(row, self._letter(letters, sending), times)
            row[0, event.lane] = event.clock + 1
            if isinstance(event.operation, Send):
                letters[number] = [row.copy(), len(self._trace.takers.get(number, ()))]
            if number in asked:
                self._rows[number] = row.copy()

    @staticmethod
    def _letter(letters: dict[int, list[object]], sending: int) -> NDArray[np.int32]:
        row, waiting = letters[sending]
        assert isinstance(waiting, int)
        assert isinstance(row, np.ndarray)
        if waiting == 1:
            del letters[sending]
        else:
            letters[sending][1] = waiting - 1
        return row


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
    """As many accessed places as there is memory for their clocks, at random but the same each
    time.
    """
    entries = turn.times * len(trace.lanes)
    places = list(found)
    random.Random(turn.program.ranks).shuffle(places)
    chosen: Accesses = {}
    events = 0
    for place in places:
        events += len(_asked(trace, {place: found[place]}))
        if events * entries > _TABLE and chosen:
            break
        chosen[place] = found[place]
    return chosen
