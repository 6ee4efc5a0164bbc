"""Bruck's algorithms: in step k every rank communicates with those 2^k away, so ceil(log2 n) steps
are enough.

all_gather (rank 0 of 5)                    all_to_all (rank 0 of 5): block at distance d
    has 0                                   travels the 1s of d: 2^0, then 2^1, then 2^2
    gets 1          from rank 1             d = 3:   rank 0 --1--> rank 1 --2--> rank 3
    gets 2 3        from rank 2
    gets 4          from rank 4             barrier: the same steps with empty messages

Each step of all_gather sends everything collected so far, and no byte is sent to a rank twice;
all_to_all sends half of everything in every step, so it is for small blocks. Works for any number
of ranks. Source: J. Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8 (1997) 1143-1156.
"""

from __future__ import annotations

from collections.abc import Iterator

from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Lane,
    Operation,
    Program,
    Reduce,
    Send,
    copy,
    receive,
)

NAME = "bruck"


def steps(ranks: int) -> list[int]:
    """The steps 1, 2, 4, ... below `ranks`."""
    return [1 << bit for bit in range((ranks - 1).bit_length())]


def all_gather(ranks: int) -> Program:
    """The number of blocks doubles in each step; those that wrap round are sent as two messages."""

    def blocks(first: int, count: int) -> Iterator[Chunks]:
        before_wrap = min(count, ranks - first)
        yield Chunks(Buffer.OUTPUT, first, before_wrap)
        if count > before_wrap:
            yield Chunks(Buffer.OUTPUT, 0, count - before_wrap)

    def lanes(rank: int) -> tuple[Lane, ...]:
        operations: list[Operation] = [copy(Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, rank))]
        for step in steps(ranks):
            count = min(step, ranks - step)
            before, after = (rank - step) % ranks, (rank + step) % ranks
            operations += [Send(chunks, (before,)) for chunks in blocks(rank, count)]
            operations += [receive(after, chunks) for chunks in blocks(after, count)]
        return (tuple(operations),)

    sends = max(2 * (ranks - 1).bit_length(), 1)
    return Program(
        NAME,
        Collective.ALL_GATHER,
        ranks,
        chunks=1,
        sends=sends,
        lanes=lanes,
        span=max(steps(ranks), default=1),
    )


def all_to_all(ranks: int) -> Program:
    """Blocks at distances that have bit k go 2^k ranks further in step k.

    Scratch memory holds the blocks by distance, then for each step the blocks sent and those
    received.
    """

    def lanes(rank: int) -> tuple[Lane, ...]:
        own = copy(Chunks(Buffer.INPUT, rank), Chunks(Buffer.OUTPUT, rank))
        operations: list[Operation] = [own]
        packed = ranks
        for step in steps(ranks):
            runs = _runs(ranks, step)
            size = sum(count for _, count in runs)
            arrived = packed + size
            operations += _pack(rank, ranks, runs, packed)
            message = Chunks(Buffer.SCRATCH, packed, size)
            operations.append(Send(message, ((rank + step) % ranks,)))
            target = Chunks(Buffer.SCRATCH, arrived, size)
            operations.append(receive((rank - step) % ranks, target))
            operations += _unpack(rank, ranks, runs, arrived)
            packed = arrived + size
        return (tuple(operations),)

    sizes = [sum(count for _, count in _runs(ranks, step)) for step in steps(ranks)]
    return Program(
        NAME,
        Collective.ALL_TO_ALL,
        ranks,
        chunks=1,
        sends=max(len(sizes), 1),
        lanes=lanes,
        span=max(sizes, default=1),
        scratch_chunks=ranks + 2 * sum(sizes),
        period=1,
    )


def _runs(ranks: int, step: int) -> list[tuple[int, int]]:
    """The distances in which the bit of a step is set, as (first, count) of each run."""
    return [(d, min(step, ranks - d)) for d in range(step, ranks, 2 * step)]


def _pack(rank: int, ranks: int, runs: list[tuple[int, int]], index: int) -> Iterator[Operation]:
    """Pack the blocks to be sent. Those of the first run start here; the others arrived earlier."""
    for first, count in runs:
        own = Chunks(Buffer.INPUT, (rank + first) % ranks)
        yield copy(own, Chunks(Buffer.SCRATCH, index))
        if count > 1:
            yield copy(
                Chunks(Buffer.SCRATCH, first + 1, count - 1),
                Chunks(Buffer.SCRATCH, index + 1, count - 1),
            )
        index += count


def _unpack(rank: int, ranks: int, runs: list[tuple[int, int]], index: int) -> Iterator[Operation]:
    """Unpack what was received. The first run, without higher bits, is at its destination; the
    others wait for their next step.
    """
    first, count = runs[0]
    for offset in range(count):
        target = Chunks(Buffer.OUTPUT, (rank - first - offset) % ranks)
        yield copy(Chunks(Buffer.SCRATCH, index + offset), target)
    index += count
    for first, count in runs[1:]:
        yield copy(Chunks(Buffer.SCRATCH, index, count), Chunks(Buffer.SCRATCH, first, count))
        index += count


def barrier(ranks: int) -> Program:
    """A rank that has heard from 2^k ranks signals the one 2^k further."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        operations: list[Operation] = []
        for step in steps(ranks):
            operations.append(Send(Chunks(Buffer.INPUT, 0), ((rank + step) % ranks,)))
            operations.append(Reduce((Incoming((rank - step) % ranks),), ()))
        return (tuple(operations),)

    sends = max((ranks - 1).bit_length(), 1)
    return Program(NAME, Collective.BARRIER, ranks, chunks=1, sends=sends, lanes=lanes, period=1)
