"""Proves that a program computes its collective, or reports where it does not.

It runs the program on symbols: a value is an input chunk and the set of ranks that it combines,
each at most once. It checks, in this order:

    form       every chunk exists, lengths agree, numbers of sends, chunks and lanes as declared
    progress   all lanes end and every message is taken, with as many slots as given (one if not)
    result     every output chunk holds each of its sources once; all_reduce: alike on every rank
    races      no chunk is written while another lane or a receiver may still be reading it
    in place   result and races once more, with the input being part of the output

A proof for one piece holds for all, because the first piece can finish before the others begin, and
the order of lanes does not matter. If there is scratch memory, which pieces share, a second piece
is run as well.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rallypoint.schedule.execution import Trace, execute
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Program,
    ProgramError,
    Reduce,
    Send,
    describe,
    error_at,
    position_of,
)
from rallypoint.schedule.proof.contents import Contents
from rallypoint.schedule.proof.races import (
    Accesses,
    Before,
    Clocks,
    RaceKind,
    accesses,
    in_place,
    races,
)
from rallypoint.schedule.proof.symmetry import Rotation, TurnedClocks, find_rotation, sample

LANES = 4  # as many as the engine has
MOST_OPERATIONS = 2_000_000  # that are checked one by one if there is a shorter way


@dataclass(frozen=True, slots=True)
class Report:
    """What was proved, and what the engine should know.

    Attributes:
        ranks: the number of ranks.
        slots: the number of slots of each lane.
        operations: the number of operations of a piece on all ranks.
        scratch_chunks: the number of scratch chunks that any rank uses.
        in_rank_order: whether every reduction goes from rank 0 to rank n - 1.
        copies_in_place: in place, some sends must copy their source, because it is overwritten
            early.
        copies_scratch: with several pieces, some sends from scratch must copy it.
        uneven: blocks may have different lengths, because no rank stores blocks that are not its
            own.
        restartable: see Program.restartable.
        proof: "all ranks" if each rank was checked; otherwise the ranks that represent the others,
            and how many others were compared with them (symmetry.py).
        races_of: the ranks that were checked for races (and for restartability): all, unless there
            are so many that a sample is used. Everything else is proved for all ranks.
    """

    ranks: int
    slots: int
    operations: int
    scratch_chunks: int
    in_rank_order: bool
    copies_in_place: bool
    copies_scratch: bool
    uneven: bool
    restartable: bool
    proof: str
    races_of: str


def verify(program: Program, *, slots: int = 1, most: int = MOST_OPERATIONS) -> Report:
    """Prove that a program is right.

    Args:
        most: with more operations than this, if the ranks are alike, some of them represent all.

    Raises:
        ProgramError: it is not; gives the rank, lane, step and chunk at fault.
    """
    turn = find_rotation(program) if operations_of(program) > most else None
    ranks = turn.period if turn else program.ranks
    form = [_Form(program, rank) for rank in range(ranks)]
    scratch = max(part.scratch for part in form)
    # After a piece, all slots are free again: only shared memory connects pieces.
    trace = execute(program, slots=slots, pieces=2 if scratch else 1, ranks=ranks)
    contents = Contents(program, trace, turn)
    contents.check()
    order = _order_of_all(program, trace) if turn is None else _order_of_some(program, trace, turn)
    if program.restartable and not order.restartable:
        raise ProgramError(
            f"{program.name} calls itself restartable, but in place it overwrites an input before "
            "all inputs have been read"
        )
    proof = "all ranks"
    if turn is not None:
        which = "rank 0" if turn.period == 1 else f"ranks 0 to {turn.period - 1}"
        proof = f"{which} for all, of which {turn.compared} were compared with them"
    return Report(
        ranks=program.ranks,
        slots=slots,
        operations=sum(part.operations for part in form) * (program.ranks // ranks),
        scratch_chunks=scratch,
        in_rank_order=contents.is_in_rank_order,
        copies_in_place=order.copies_in_place,
        copies_scratch=order.copies_scratch,
        uneven=program.chunks == 1 and not scratch,
        restartable=order.restartable,
        proof=proof,
        races_of=order.races_of,
    )


def operations_of(program: Program) -> int:
    """Approximately how many operations all ranks have together."""
    return sum(len(lane) for lane in program.lanes(0)) * program.ranks


@dataclass(frozen=True, slots=True)
class _Order:
    """What the order of accesses allows; the fields are those of Report."""

    copies_scratch: bool
    copies_in_place: bool
    restartable: bool
    races_of: str


def _order_of_all(program: Program, trace: Trace) -> _Order:
    """Check the order of the accesses of all ranks, or of a sample if they are too many."""
    clocks = Clocks(trace)
    if program.collective is Collective.BARRIER:
        _check_barrier(program, trace, clocks)
    found = accesses(trace)
    races_of = "all ranks"
    if clocks.is_large:
        chosen = _sample(program.ranks)
        found = {location: row for location, row in found.items() if location[0] in chosen}
        races_of = f"{len(chosen)} ranks"
    shared = in_place(program, trace, found)
    return _Order(
        copies_scratch=_check_races(program, trace, clocks, found),
        copies_in_place=_check_races(program, trace, clocks, shared, in_place=True),
        restartable=_is_restartable(trace, clocks, found, shared),
        races_of=races_of,
    )


def _order_of_some(program: Program, trace: Trace, turn: Rotation) -> _Order:
    """The same for ranks that represent all, and for as many of their chunks as memory allows."""
    found = accesses(trace)
    shared = in_place(program, trace, found)
    some, some_shared = sample(trace, turn, found), sample(trace, turn, shared)
    is_whole = len(some) == len(found) and len(some_shared) == len(shared)
    clocks, shared_clocks = TurnedClocks(trace, turn, some), TurnedClocks(trace, turn, some_shared)
    return _Order(
        copies_scratch=_check_races(program, trace, clocks, some),
        copies_in_place=_check_races(program, trace, shared_clocks, some_shared, in_place=True),
        restartable=False,
        races_of="all ranks" if is_whole else f"{len(some)} of {len(found)} chunks",
    )


def _sample(ranks: int) -> set[int]:
    """The first ranks, the last ones, and some in between at random, the same each time."""
    chance = random.Random(ranks)
    return {*range(4), *range(ranks - 4, ranks), *(chance.randrange(ranks) for _ in range(8))}


class _Form:
    """Checks what each rank's operations alone can show."""

    def __init__(self, program: Program, rank: int) -> None:
        self._program, self._rank = program, rank
        self._sizes = (
            program.input_blocks(rank) * program.chunks,
            program.output_blocks(rank) * program.chunks,
            program.scratch_chunks,
        )
        self.operations = 0
        self.scratch = 0
        lanes = program.lanes(rank)
        if len(lanes) > LANES:
            raise self._error(f"has {len(lanes)} lanes; {LANES} are the most")
        for number, lane in enumerate(lanes):
            sends = 0
            for step, operation in enumerate(lane):
                self.operations += 1
                self._current = (number, step, operation)
                if isinstance(operation, Send):
                    sends += 1
                    self._check_send(operation)
                else:
                    self._check_reduce(operation)
            if sends > program.sends:
                raise self._error(f"lane {number} sends {sends} times, not {program.sends}")

    def _check_send(self, send: Send) -> None:
        self._check_chunks(send.source)
        if not send.to or len(set(send.to)) < len(send.to):
            raise self._fault("a send needs receivers, each once")
        for peer in send.to:
            self._check_peer(peer)

    def _check_reduce(self, reduce: Reduce) -> None:
        if not reduce.operands:
            raise self._fault("there is nothing to reduce")
        counts = {target.count for target in reduce.targets}
        for operand in reduce.operands:
            if isinstance(operand, Incoming):
                self._check_peer(operand.peer)
            else:
                self._check_chunks(operand)
                counts.add(operand.count)
        for target in reduce.targets:
            self._check_chunks(target)
            if target.buffer is Buffer.INPUT:
                raise self._fault("inputs are not written")
        if self._program.reduces_at_once and 1 < len(reduce.operands) < self._program.ranks:
            raise self._fault("the program says that each reduction has the inputs of all ranks")
        if len(counts) > 1:
            raise self._fault("operands and targets differ in their number of chunks")

    def _check_chunks(self, chunks: Chunks) -> None:
        most = self._sizes[chunks.buffer]
        end = chunks.index + chunks.count
        if chunks.index < 0 or chunks.count < 1 or end > most:
            raise self._fault(f"this rank has {most} chunks of {chunks.buffer.name.lower()}")
        if chunks.count > self._program.span:
            raise self._fault(f"the program's span is {self._program.span}, not {chunks.count}")
        if chunks.buffer is Buffer.SCRATCH:
            self.scratch = max(self.scratch, end)

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self._program.ranks or peer == self._rank:
            raise self._fault(f"rank {peer} is not another rank")

    def _fault(self, text: str) -> ProgramError:
        lane, step, operation = self._current
        return error_at(
            self._program, text, rank=self._rank, lane=lane, step=step, operation=operation
        )

    def _error(self, text: str) -> ProgramError:
        return ProgramError(f"{self._program.name}: rank {self._rank} {text}", rank=self._rank)


def _check_barrier(program: Program, trace: Trace, clocks: Clocks) -> None:
    """Check that every rank that ends has heard, perhaps through others, of every rank's first
    event.
    """
    known: list[set[int]] = [set() for _ in range(program.ranks)]
    for number, event in enumerate(trace.events):
        if event.piece == 0:
            rank = trace.lanes[event.lane][0]
            heard = clocks.row(number).nonzero()[0]
            known[rank].update(trace.lanes[lane][0] for lane in heard)
    for rank, ranks in enumerate(known):
        for peer in range(program.ranks):
            if peer != rank and peer not in ranks:
                raise ProgramError(
                    f"{program.name}: rank {rank} does not wait for rank {peer}", rank=rank
                )


def _check_races(
    program: Program, trace: Trace, clocks: Before, found: Accesses, *, in_place: bool = False
) -> bool:
    """Whether a send must copy its source, as it may be overwritten early.

    This may be necessary for scratch memory, which pieces share, and in place. Any other race is an
    error.
    """
    must_copy = False
    for race in races(trace, clocks, found):
        other, write = trace.events[race.other.event], trace.events[race.write.event]
        if race.kind is RaceKind.MESSAGE and (in_place or other.piece != write.piece):
            must_copy = True
            continue
        rank, buffer, index = race.location
        (_, lane), (_, other_lane) = trace.lanes[write.lane], trace.lanes[other.lane]
        position = position_of(rank=rank, lane=lane, step=write.step, operation=write.operation)
        raise ProgramError(
            f"{program.name}: {position}{': in place' if in_place else ''} overwrites "
            f"{buffer.name.lower()} {index}, which lane {other_lane}, step {other.step} "
            f"({describe(other.operation)}) uses{race.kind.value}",
            rank=rank,
            lane=lane,
            step=write.step,
            chunk=index,
        )
    if in_place and must_copy and not program.copies:
        raise ProgramError(
            f"{program.name} overwrites, in place, what it sent before its receivers have taken "
            "it; give the program copies=True, or let the write wait for a message from them"
        )
    return must_copy


def _is_restartable(trace: Trace, clocks: Clocks, found: Accesses, shared: Accesses) -> bool:
    """Whether, in place, inputs are overwritten only after all inputs have been read."""
    overwrites = [
        next(access.event for access in row if access.writes)
        for row in shared.values()
        if any(access.writes for access in row)
    ]
    ends: dict[int, int] = {}  # the last event of each lane
    for row in found.values():
        for access in row:
            if access.is_input:
                ends.update(
                    (trace.events[e].lane, e)
                    for e in access.ends
                    if e > ends.get(trace.events[e].lane, -1)
                )
    return all(
        end == write or clocks.before(end, write) for write in overwrites for end in ends.values()
    )
