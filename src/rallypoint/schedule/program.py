"""What a collective algorithm is: for each rank, who sends which chunk to whom, who reduces what.

A program is frozen, knows neither dtype nor operator nor byte, and is parametric in the rank: the
operations of one rank are generated when asked for, so that a program of 100,000 ranks is small.

A buffer is a row of blocks, a block is a row of `chunks` chunks, and chunk `i` of any buffer is as
long as chunk `i % chunks` of every other. Lanes of one rank run side by side, each in its own
order. Data larger than a slot is run through the same program piece by piece, lane by lane.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Collective(IntEnum):
    """What a program does as a whole."""

    ALL_REDUCE = 0
    BROADCAST = 1
    ALL_GATHER = 2
    BARRIER = 3
    SEND = 4

    def input_blocks(self, ranks: int) -> int:
        """How many blocks (each one `count` of the call) a rank puts in."""
        del ranks  # one each; scatter and all_to_all will differ
        return 1

    def output_blocks(self, ranks: int) -> int:
        """How many blocks a rank gets out."""
        return ranks if self is Collective.ALL_GATHER else 1


class Buffer(IntEnum):
    """Where chunks live. Input and output may be the same memory."""

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
    taken by one lane of the receiver.
    """

    peer: int
    lane: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Send chunks to one or several ranks; `source` stays untouched until each has taken them."""

    source: Chunks
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reduce:
    """Combine the operands from left to right, and store the result in every target.

    One operand makes it a copy or a receive; no target, the acceptance of an empty message.
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
        name: the algorithm, e.g. ``"ring"``.
        chunks: into how many chunks each block is cut.
        scratch_chunks: how many chunks of scratch memory each rank needs.
        sends: the most sends that any lane of any rank has (the engine numbers messages by it).
        lanes: rank -> its lanes.
    """

    name: str
    collective: Collective
    ranks: int
    chunks: int
    sends: int
    lanes: Callable[[int], tuple[Lane, ...]]
    scratch_chunks: int = 0


class ProgramError(ValueError):
    """A program cannot work; the message names the rank and the operation."""
