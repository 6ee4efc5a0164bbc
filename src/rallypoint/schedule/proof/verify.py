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

from rallypoint.schedule.execution import Trace, chunk_of, execute
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
    if operations_of(program) > most:
        turn = find_rotation(program)
        if turn is not None:
            return _verify_turned(program, turn, slots)
    form = [_Form(program, rank) for rank in range(program.ranks)]
    # After a piece, all slots are free again: only shared memory connects pieces.
    trace = execute(program, slots=slots, pieces=2 if any(p.scratch for p in form) else 1)
    clocks = Clocks(trace)
    contents = Contents(program, trace)
    contents.check()
    if program.collective is Collective.BARRIER:
        _check_barrier(program, trace, clocks)
    found = accesses(trace)
    chosen = _sample(program.ranks) if clocks.is_large else None
    if chosen is not None:
        found = {place: row for place, row in found.items() if place[0] in chosen}
    copies_apart = _check_races(program, trace, clocks, found)
    shared = in_place(program, trace, found)
    copies_in_place = _check_races(program, trace, clocks, shared, in_place=True)
    _check_copies(program, copies_in_place)
    restartable = _is_restartable(trace, clocks, found, shared)
    if program.restartable and not restartable:
        raise ProgramError(
            f"{program.name} calls itself restartable, but in place it overwrites an input before "
            "all inputs have been read"
        )
    return Report(
        ranks=program.ranks,
        slots=slots,
        operations=sum(part.operations for part in form),
        scratch_chunks=max(part.scratch for part in form),
        in_rank_order=contents.is_in_rank_order,
        copies_in_place=copies_in_place,
        copies_scratch=copies_apart,
        uneven=program.chunks == 1 and not any(part.scratch for part in form),
        restartable=restartable,
        proof="all ranks",
        races_of="all ranks" if chosen is None else f"{len(chosen)} ranks",
    )


def operations_of(program: Program) -> int:
    """Approximately how many operations all ranks have together."""
    return sum(len(lane) for lane in program.lanes(0)) * program.ranks


def _verify_turned(program: Program, turn: Rotation, slots: int) -> Report:
    """The same, with some ranks that represent all."""
    form = [_Form(program, rank) for rank in range(turn.period)]
    pieces = 2 if any(part.scratch for part in form) else 1
    trace = execute(program, slots=slots, pieces=pieces, ranks=turn.period)
    contents = Contents(program, trace, turn)
    contents.check()
    found = accesses(trace)
    shared = in_place(program, trace, found)
    some, some_shared = sample(trace, turn, found), sample(trace, turn, shared)
    is_whole = len(some) == len(found) and len(some_shared) == len(shared)
    copies = [
        _check_races(program, trace, TurnedClocks(trace, turn, places), places, in_place=again)
        for places, again in ((some, False), (some_shared, True))
    ]
    _check_copies(program, copies[1])
    which = "rank 0" if turn.period == 1 else f"ranks 0 to {turn.period - 1}"
    return Report(
        ranks=program.ranks,
        slots=slots,
        operations=sum(part.operations for part in form) * turn.times,
        scratch_chunks=max(part.scratch for part in form),
        in_rank_order=contents.is_in_rank_order,
        copies_in_place=copies[1],
        copies_scratch=copies[0],
        uneven=program.chunks == 1 and not any(part.scratch for part in form),
        restartable=False,
        proof=f"{which} for all, of which {turn.compared} were compared with them",
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
                self._place = (number, step, operation)
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
        counts = {place.count for place in reduce.targets}
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
        lane, step, operation = self._place
        return ProgramError(
            f"{self._program.name}: rank {self._rank}, lane {lane}, step {step} "
            f"({describe(operation)}): {text}",
            rank=self._rank,
            lane=lane,
            step=step,
            chunk=chunk_of(operation),
        )

    def _error(self, text: str) -> ProgramError:
        return ProgramError(f"{self._program.name}: rank {self._rank} {text}", rank=self._rank)


def _check_barrier(program: Program, trace: Trace, clocks: Clocks) -> None:
    """Check that every rank that ends has heard, perhaps through others, of every rank's first
    event.
    """
    known = [set() for _ in range(program.ranks)]  # type: list[set[int]]
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
    program: Program,
    trace: Trace,
    clocks: Before,
    found: Accesses,
    *,
    in_place: bool = False,
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
        rank, buffer, index = race.place
        (_, lane), (_, other_lane) = trace.lanes[write.lane], trace.lanes[other.lane]
        raise ProgramError(
            f"{program.name}: rank {rank}, lane {lane}, step {write.step} "
            f"({describe(write.operation)}){': in place' if in_place else ''} overwrites "
            f"{buffer.name.lower()} {index}, which lane {other_lane}, step {other.step} "
            f"({describe(other.operation)}) uses{race.kind.value}",
            rank=rank,
            lane=lane,
            step=write.step,
            chunk=index,
        )
    return must_copy


def _check_copies(program: Program, must_copy: bool) -> None:
    if must_copy and not program.copies:
        raise ProgramError(
            f"{program.name} overwrites, in place, what it sent before its receivers have taken "
            "it; give the program copies=True, or let the write wait for a message from them"
        )


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
