"""A collective algorithm as data: for each rank, the chunks that it sends, receives and reduces.

A program is frozen and independent of dtype, operator and size. The operations of a rank are
generated on request, so that a program of 100,000 ranks is small.

A buffer is a row of blocks, a block is a row of `chunks` chunks, and chunk `i` of any buffer is as
long as chunk `i % chunks` of every other. Lanes of one rank run side by side, each in its own
order. Data larger than a slot passes through the same program piece by piece, in each lane; lanes
do not wait for each other between pieces, and all pieces share the scratch chunks.

The engine decides the length of a block. A program in which every message goes from input or output
to output also works with blocks of different lengths, because every rank that holds a block knows
its owner. verify.py reports such programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

from rallypoint.base.collective import Collective as Collective  # noqa: PLC0414 - re-exported
from rallypoint.base.errors import CallerError

SLOTS = 3  # number of messages of any length that a lane of the engine can always have in flight


class Buffer(IntEnum):
    """The buffer that holds chunks. Input and output may be the same memory."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


@dataclass(frozen=True, slots=True)
class Chunks:
    """`count` consecutive chunks of a buffer, from `index` on."""

    buffer: Buffer
    index: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Incoming:
    """The next message that lane `lane` of rank `peer` sends to this rank.

    Messages arrive in the order they were sent, and all messages from one lane of a peer are
    received by one lane of the receiver.
    """

    peer: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Send chunks to one or several ranks; `source` must not change until each has received
    them.
    """

    source: Chunks
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine the operands from left to right, and store the result in every target.

    With one operand it is a copy or a receive; with no target, it accepts an empty message.
    """

    operands: tuple[Chunks | Incoming, ...]
    targets: tuple[Chunks, ...]


Operation = Send | Reduce
Lane = tuple[Operation, ...]


def copy(source: Chunks, target: Chunks) -> Reduce:
    """Copy local chunks."""
    return Reduce((source,), (target,))


def receive(peer: int, target: Chunks, *, lane: int = 0) -> Reduce:
    """Store the next message of a peer."""
    return Reduce((Incoming(peer, lane),), (target,))


@dataclass(frozen=True, slots=True)
class Program:
    """A collective algorithm for a given number of ranks.

    Attributes:
        name: the algorithm's, e.g. ``"ring"``.
        chunks: the number of chunks in a block.
        scratch_chunks: the number of chunks of scratch memory that each rank needs.
        sends: the largest number of sends of any lane (the engine numbers messages by it).
        lanes: rank -> its lanes.
        span: the largest number of chunks of any operation (it limits the size of a piece).
        root: the root rank, in collectives that have one.
        reduces_at_once: every reduction of several operands combines the inputs of all ranks, so
            that an average is rounded only once.
        period: ranks this far apart do the same, with peers at the same distances; 0 if there is no
            such symmetry. Simulations then run only `period` ranks.
        restartable: even in place, no input is overwritten before all inputs have been read for the
            last time; so survivors can restart a call of one piece.
        copies: in place, a sent chunk may be overwritten before its receivers have it, so senders
            must copy it; otherwise receivers may read it where it lies.
    """

    name: str
    collective: Collective
    ranks: int
    chunks: int
    sends: int
    lanes: Callable[[int], tuple[Lane, ...]]
    scratch_chunks: int = 0
    span: int = 1
    root: int = 0
    restartable: bool = False
    copies: bool = False
    reduces_at_once: bool = False
    period: int = 0

    def input_blocks(self, rank: int) -> int:
        """The number of blocks in the rank's input."""
        return self.collective.input_blocks(self.ranks, is_root=rank == self.root)

    def output_blocks(self, rank: int) -> int:
        """The number of blocks in the rank's output."""
        return self.collective.output_blocks(self.ranks, is_root=rank == self.root)


class ProgramError(CallerError, ValueError):
    """A program that cannot work.

    Attributes:
        rank, lane, step, chunk: the position of the error; each None if it is not a single one.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        lane: int | None = None,
        step: int | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.lane = lane
        self.step = step
        self.chunk = chunk


def incoming(operation: Operation) -> tuple[Incoming, ...]:
    """The messages that an operation receives, in the order of its operands."""
    if isinstance(operation, Send):
        return ()
    return tuple(each for each in operation.operands if isinstance(each, Incoming))


def transformed(
    operation: Operation,
    *,
    chunks: Callable[[Chunks], Chunks] = lambda chunks: chunks,
    peer: Callable[[int], int] = lambda rank: rank,
    lane: Callable[[int], int] = lambda lane: lane,
) -> Operation:
    """The same operation on other chunks, with other peers, and from other lanes of theirs."""
    if isinstance(operation, Send):
        return Send(chunks(operation.source), tuple(map(peer, operation.to)))
    operands: tuple[Chunks | Incoming, ...] = tuple(
        Incoming(peer(each.peer), lane(each.lane)) if isinstance(each, Incoming) else chunks(each)
        for each in operation.operands
    )
    return Reduce(operands, tuple(map(chunks, operation.targets)))


def widen(program: Program, copies: int) -> Program:
    """The same algorithm `copies` times side by side, each for a slice of the data, in lanes of its
    own. This pays where a single lane cannot saturate a link or a core.

        block of 2 chunks         0   1                  lane 0, 1
        the same, in 2 copies     0   1 | 2   3          lanes 0, 2 for chunks 0, 1; 1, 3 for 2, 3
    """
    if copies == 1:
        return program
    chunks = program.chunks
    torn = ProgramError(f"{program.name} moves several blocks at once: it cannot be widened")
    if program.span > chunks:
        raise torn

    def widened(operation: Operation, number: int) -> Operation:
        def slice_of(source: Chunks) -> Chunks:
            block, chunk = divmod(source.index, chunks)
            if chunk + source.count > chunks:
                raise torn
            return replace(source, index=(block * copies + number) * chunks + chunk)

        return transformed(operation, chunks=slice_of, lane=lambda lane: lane * copies + number)

    def lanes(rank: int) -> tuple[Lane, ...]:
        return tuple(
            tuple(widened(operation, number) for operation in lane)
            for lane in program.lanes(rank)
            for number in range(copies)
        )

    return replace(
        program,
        name=f"{program.name} x{copies}",
        chunks=chunks * copies,
        scratch_chunks=-(-program.scratch_chunks // chunks) * chunks * copies,
        lanes=lanes,
        restartable=False,
    )


def describe(operation: Operation) -> str:
    """An operation in words, e.g. ``"input 0 + from rank 1 -> output 0"``."""
    if isinstance(operation, Send):
        ranks = "ranks" if len(operation.to) > 1 else "rank"
        return f"send {_words(operation.source)} to {ranks} {', '.join(map(str, operation.to))}"
    operands = " + ".join(_words(operand) for operand in operation.operands)
    targets = " and ".join(_words(target) for target in operation.targets)
    return f"{operands} -> {targets or 'nothing'}"


def _words(value: Chunks | Incoming) -> str:
    if isinstance(value, Incoming):
        return f"from rank {value.peer}" + (f" lane {value.lane}" if value.lane else "")
    last = f" to {value.index + value.count - 1}" if value.count > 1 else ""
    return f"{value.buffer.name.lower()} {value.index}{last}"


def position_of(*, rank: int, lane: int, step: int, operation: Operation) -> str:
    """An operation and its position in its program, in words."""
    return f"rank {rank}, lane {lane}, step {step} ({describe(operation)})"


def error_at(
    program: Program, text: str, *, rank: int, lane: int, step: int, operation: Operation
) -> ProgramError:
    """An error of one operation."""
    if isinstance(operation, Send):
        chunk: int | None = operation.source.index
    else:
        chunk = operation.targets[0].index if operation.targets else None
    position = position_of(rank=rank, lane=lane, step=step, operation=operation)
    message = f"{program.name}: {position}: {text}"
    return ProgramError(message, rank=rank, lane=lane, step=step, chunk=chunk)
