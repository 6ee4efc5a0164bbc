"""The symbolic contents of chunks while a program runs: an input chunk, and ranks, each once.

A value is (input chunk, set of ranks as bits, order). Combining values of different chunks,
or two values that hold the same rank, fails at once. Equal orders have equal numbers, so that "the
same operands in the same order" is a comparison of two numbers.

Where some ranks represent all (symmetry.py), a value from a peer is turned, and so is its order:
its number times the number of possible turns, plus the number of turns made.
"""

from __future__ import annotations

from typing import NamedTuple

from rallypoint.base.collective import Collective
from rallypoint.base.wording import runs_of
from rallypoint.schedule.execution import Event, Trace
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Incoming,
    Program,
    ProgramError,
    Send,
    describe,
    error_at,
)
from rallypoint.schedule.proof.symmetry import Rotation


class Value(NamedTuple):
    """What a chunk holds."""

    chunk: int
    ranks: int  # bit r is set for rank r
    order: int  # its number in Contents.orders


class Contents:
    """Runs the first piece of a trace on symbols."""

    def __init__(self, program: Program, trace: Trace, turn: Rotation | None = None) -> None:
        self._program, self._trace, self._turn = program, trace, turn
        self._times = turn.times if turn else 1
        self._orders: dict[tuple[int, ...], int] = {(r,): r for r in range(program.ranks)}
        self._messages: dict[int, list[Value]] = {}
        self._values: dict[tuple[int, Buffer, int], Value] = {}
        self._writers: dict[tuple[int, Buffer, int], Event] = {}
        for rank in range(trace.ranks):
            for index in range(program.input_blocks(rank) * program.chunks):
                self._values[rank, Buffer.INPUT, index] = Value(
                    index, 1 << rank, rank * self._times
                )
        for number, event in enumerate(trace.events):
            if event.piece == 0:
                self._run(number, event)

    def _run(self, number: int, event: Event) -> None:
        operation = event.operation
        if isinstance(operation, Send):
            self._messages[number] = self._read(event, operation.source)
            return
        messages = iter(event.takes)
        operands = [
            self._read(event, operand)
            if isinstance(operand, Chunks)
            else self._taken(operand, self._messages[next(messages)])
            for operand in operation.operands
        ]
        for target in operation.targets:
            for operand in operands:
                if len(operand) != target.count:
                    raise self._error(event, f"a message of {len(operand)} chunks comes here")
            self._write(event, target, operands)

    def _taken(self, operand: Incoming, values: list[Value]) -> list[Value]:
        """The values of a message: those that its sender sent or, if the sender's representative
        did, those turned.
        """
        if self._turn is None or operand.peer < self._trace.ranks:
            return values
        times = operand.peer // self._trace.ranks
        return [self._turned(self._turn, value, times) for value in values]

    def _turned(self, turn: Rotation, value: Value, times: int) -> Value:
        number, turned = divmod(value.order, self._times)
        order = number * self._times + (turned + times) % self._times
        index = turn.index(Buffer.INPUT, value.chunk, times)
        return Value(index, turn.bits(value.ranks, times), order)

    def _read(self, event: Event, chunks: Chunks) -> list[Value]:
        rank = self._trace.lanes[event.lane][0]
        values = []
        for index in range(chunks.index, chunks.index + chunks.count):
            value = self._values.get((rank, chunks.buffer, index))
            if value is None:
                raise self._error(event, f"{chunks.buffer.name.lower()} {index} holds nothing yet")
            values.append(value)
        return values

    def _write(self, event: Event, target: Chunks, operands: list[list[Value]]) -> None:
        rank, chunks = self._trace.lanes[event.lane][0], self._program.chunks
        for offset in range(target.count):
            index = target.index + offset
            value = operands[0][offset]
            if len(operands) > 1:
                value = self._combine(event, [operand[offset] for operand in operands])
            if (value.chunk - index) % chunks:
                raise self._error(
                    event,
                    f"chunk {value.chunk % chunks} of a block is put where chunk "
                    f"{index % chunks} belongs; they may differ in length",
                )
            self._values[rank, target.buffer, index] = value
            self._writers[rank, target.buffer, index] = event

    def _combine(self, event: Event, values: list[Value]) -> Value:
        if not self._program.collective.reduces:
            raise self._error(event, f"{self._program.collective.operation} reduces nothing")
        chunk, ranks = values[0].chunk, 0
        for value in values:
            if value.chunk != chunk:
                raise self._error(event, f"chunk {value.chunk} is combined with chunk {chunk}")
            if value.ranks & ranks:
                twice = ranks_of(value.ranks & ranks)
                raise self._error(event, f"chunk {chunk} of {twice} would be counted twice")
            ranks |= value.ranks
        return Value(chunk, ranks, self._order(values))

    def _order(self, values: list[Value]) -> int:
        """The number of an order, turned as often as the first operand's; the others relative to
        it.
        """
        if self._turn is None:
            order = tuple(value.order for value in values)
            return self._orders.setdefault(order, self._next_order())
        times = self._times
        turned = values[0].order % times
        order = tuple(
            each.order // times * times + (each.order - turned) % times for each in values
        )
        return self._orders.setdefault(order, self._next_order()) * times + turned

    def _next_order(self) -> int:
        return self._program.ranks + len(self._orders)

    def check(self) -> None:
        """Raise ProgramError unless every output chunk holds what the collective promises."""
        program = self._program
        if program.collective is Collective.BARRIER:
            return
        for rank in range(self._trace.ranks):
            source = program.collective.source_block(rank, program.ranks)
            everyone = (1 << program.collective.contributors(rank, program.ranks).stop) - 1
            for block in range(program.output_blocks(rank)):
                ranks = everyone
                if not program.collective.reduces:
                    ((peer, _),) = program.collective.sources(
                        rank=rank, block=block, ranks=program.ranks, root=program.root
                    )
                    ranks = 1 << peer
                for chunk in range(program.chunks):
                    index = block * program.chunks + chunk
                    wanted = source * program.chunks + chunk
                    self._check_output(rank, index, wanted, ranks)
        if program.collective.is_prefix and not self.is_in_rank_order:
            raise ProgramError(f"{program.name} does not combine inputs in the order of ranks")
        if self._turn and program.collective is Collective.ALL_REDUCE:
            self._check_turned_alike(self._turn)

    def _check_output(self, rank: int, index: int, wanted: int, ranks: int) -> None:
        value = self._values.get((rank, Buffer.OUTPUT, index))
        who = f"{self._program.name}: rank {rank}: output {index}"
        if value is None:
            raise ProgramError(f"{who} is never written", rank=rank, chunk=index)
        if (value.chunk, value.ranks) == (wanted, ranks):
            if self._program.collective is Collective.ALL_REDUCE:
                self._check_alike(rank, index, value)
            return
        text = f"{who} holds input {value.chunk} of {ranks_of(value.ranks)}, not "
        text += f"input {wanted} of {ranks_of(ranks)}"
        event = self._writers.get((rank, Buffer.OUTPUT, index))
        if event is None:
            raise ProgramError(f"{text}; it is never written", rank=rank, chunk=index)
        lane = self._trace.lanes[event.lane][1]
        text += f"; lane {lane}, step {event.step} ({describe(event.operation)}) put it there"
        raise ProgramError(text, rank=rank, lane=lane, step=event.step, chunk=index)

    def _check_turned_alike(self, turn: Rotation) -> None:
        """Check that each rank has what the one before it has, turned: then this holds for all."""
        for index in range(self._program.chunks):
            value = self._turned(turn, self._values[0, Buffer.OUTPUT, index], 1)
            self._check_alike(turn.period, turn.index(Buffer.OUTPUT, index, 1), value)

    def _check_alike(self, rank: int, index: int, value: Value) -> None:
        first = self._values[0, Buffer.OUTPUT, index]
        if value.order != first.order:
            raise ProgramError(
                f"{self._program.name}: rank {rank}: output {index} is combined in another order "
                "than on rank 0, so that their bits may differ; let one rank combine it for all, "
                "or all combine in the same order",
                rank=rank,
                chunk=index,
            )

    @property
    def is_in_rank_order(self) -> bool:
        """Whether every output chunk was combined from rank 0 to rank n - 1."""
        if self._turn is not None:
            return not self._program.collective.reduces  # turned orders cannot all begin at rank 0
        parts = {number: order for order, number in self._orders.items()}
        flat: dict[int, list[int]] = {}

        def flatten(number: int) -> list[int]:
            if number < self._program.ranks:
                return [number]
            if number not in flat:
                flat[number] = [rank for part in parts[number] for rank in flatten(part)]
            return flat[number]

        orders = {v.order for (_, buffer, _), v in self._values.items() if buffer is Buffer.OUTPUT}
        return all(flatten(order) == sorted(flatten(order)) for order in orders)

    def _error(self, event: Event, text: str) -> ProgramError:
        rank, lane = self._trace.lanes[event.lane]
        return error_at(
            self._program, text, rank=rank, lane=lane, step=event.step, operation=event.operation
        )


def ranks_of(bits: int) -> str:
    """A set of ranks in words: 0b10110 -> ``"ranks 1, 2, 4"``; longer runs as ``"0-7"``."""
    ranks = [rank for rank in range(bits.bit_length()) if bits >> rank & 1]
    words = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run))
        for run in runs_of(ranks)
    ]
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(words)
