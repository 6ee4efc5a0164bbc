"""Bruck's algorithms: in step k every rank talks to those 2^k away, so ceil(log2 n) steps do.

all_gather (rank 0 of 5)                    all_to_all (rank 0 of 5): block at distance d
    has 0                                   travels the 1s of d: 2^0, then 2^1, then 2^2
    gets 1          from rank 1             d = 3:   rank 0 --1--> rank 1 --2--> rank 3
    gets 2 3        from rank 2
    gets 4          from rank 4             barrier: the same steps with empty messages

Each step of all_gather sends all that there is, so no byte is sent twice; all_to_all sends half of
everything in every step, so it is for small blocks. Any number of ranks.
Source: J. Bruck et al., IEEE Trans. Parallel Distrib. Syst. 8 (1997) 1143-1156.
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
    """1, 2, 4, ... below `ranks`."""
    return [1 << bit for bit in range((ranks - 1).bit_length())]


def all_gather(ranks: int) -> Program:
    """Twice as many blocks after each step; those that wrap round go as two messages."""

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

    Scratch memory holds the blocks by distance, then for each step a place to pack what is sent.
    """
    waves = [[d for d in range(ranks) if d & step] for step in steps(ranks)]

    def lanes(rank: int) -> tuple[Lane, ...]:
        operations: list[Operation] = []
        packed = ranks
        for step, wave in zip(steps(ranks), waves, strict=True):
            for place, distance in enumerate(wave):
                # Its lower bits are behind it if it has any; otherwise it starts here.
                moved = distance & (step - 1)
                source = (
                    Chunks(Buffer.SCRATCH, distance)
                    if moved
                    else Chunks(Buffer.INPUT, (rank + distance) % ranks)
                )
                operations.append(copy(source, Chunks(Buffer.SCRATCH, packed + place)))
            message = Chunks(Buffer.SCRATCH, packed, len(wave))
            packed += len(wave)
            operations.append(Send(message, ((rank + step) % ranks,)))
            arrived = Chunks(Buffer.SCRATCH, packed, len(wave))
            packed += len(wave)
            operations.append(receive((rank - step) % ranks, arrived))
            for place, distance in enumerate(wave):
                is_there = distance < 2 * step
                target = (
                    Chunks(Buffer.OUTPUT, (rank - distance) % ranks)
                    if is_there
                    else Chunks(Buffer.SCRATCH, distance)
                )
                operations.append(copy(Chunks(Buffer.SCRATCH, arrived.index + place), target))
        keep = copy(Chunks(Buffer.INPUT, rank), Chunks(Buffer.OUTPUT, rank))
        return ((keep, *operations),)

    return Program(
        NAME,
        Collective.ALL_TO_ALL,
        ranks,
        chunks=1,
        sends=max(len(waves), 1),
        lanes=lanes,
        span=max((len(wave) for wave in waves), default=1),
        scratch_chunks=ranks + 2 * sum(len(wave) for wave in waves),
    )


def barrier(ranks: int) -> Program:
    """Who has heard from 2^k ranks tells the one 2^k further."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        operations: list[Operation] = []
        for step in steps(ranks):
            operations.append(Send(Chunks(Buffer.INPUT, 0), ((rank + step) % ranks,)))
            operations.append(Reduce((Incoming((rank - step) % ranks),), ()))
        return (tuple(operations),)

    sends = max((ranks - 1).bit_length(), 1)
    return Program(NAME, Collective.BARRIER, ranks, chunks=1, sends=sends, lanes=lanes)
