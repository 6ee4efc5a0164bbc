"""Ring algorithms: each rank receives from its left neighbour and sends to its right one.

    0 -> 1 -> 2 -> 3 -+        step s of the first half: rank r adds its own chunk (r - 1 - s)
    ^                 |        to what came and passes it on; after n - 1 steps rank r holds the
    +-----------------+        finished chunk r + 1, which goes round once more.

2 (n - 1) steps, and 2 (n - 1) / n of the data through every link: the minimum for any algorithm.
Chunk c is reduced in the order c, c + 1, ..., c - 1 by one rank, so all ranks get the same bits.
Source: P. Patarasuk, X. Yuan, J. Parallel Distrib. Comput. 69 (2009) 117-124.
"""

from __future__ import annotations

from rallypoint.schedule.algorithms import direct
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


def all_reduce(ranks: int) -> Program:
    """Reduce-scatter round the ring, then all-gather round the ring."""
    if ranks == 1:
        return direct.all_reduce_one_shot(1)

    def lanes(rank: int) -> tuple[Lane, ...]:
        left, right = (rank - 1) % ranks, (rank + 1) % ranks
        operations: list[Operation] = [Send(Chunks(Buffer.INPUT, rank), (right,))]
        for step in range(ranks - 1):
            index = (rank - 1 - step) % ranks
            own, result = Chunks(Buffer.INPUT, index), Chunks(Buffer.OUTPUT, index)
            operations += [Reduce((Incoming(left), own), (result,)), Send(result, (right,))]
        for step in range(ranks - 1):
            result = Chunks(Buffer.OUTPUT, (rank - step) % ranks)
            operations.append(receive(left, result))
            if step < ranks - 2:
                operations.append(Send(result, (right,)))
        return (tuple(operations),)

    sends = 2 * (ranks - 1)
    return Program(
        "ring", Collective.ALL_REDUCE, ranks, chunks=ranks, sends=sends, lanes=lanes, period=1
    )


def all_gather(ranks: int) -> Program:
    """Each block goes round the ring once."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        left, right = (rank - 1) % ranks, (rank + 1) % ranks
        own = copy(Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, rank))
        if ranks == 1:
            return ((own,),)
        operations: list[Operation] = [Send(Chunks(Buffer.INPUT, 0), (right,)), own]
        for step in range(ranks - 1):
            block = Chunks(Buffer.OUTPUT, (rank - 1 - step) % ranks)
            operations.append(receive(left, block))
            if step < ranks - 2:
                operations.append(Send(block, (right,)))
        return (tuple(operations),)

    sends = max(ranks - 1, 1)
    return Program(
        "ring", Collective.ALL_GATHER, ranks, chunks=1, sends=sends, lanes=lanes, period=1
    )


def reduce_scatter(ranks: int) -> Program:
    """Block b starts at rank b + 1 and is complete when it reaches rank b."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        left, right = (rank - 1) % ranks, (rank + 1) % ranks
        result = Chunks(Buffer.OUTPUT, 0)
        if ranks == 1:
            return ((copy(Chunks(Buffer.INPUT, 0), result),),)
        operations: list[Operation] = [Send(Chunks(Buffer.INPUT, left), (right,))]
        for step in range(ranks - 1):
            index = (rank - 2 - step) % ranks
            operands = (Incoming(left), Chunks(Buffer.INPUT, index))
            if index == rank:
                operations.append(Reduce(operands, (result,)))
            else:
                partial = Chunks(Buffer.SCRATCH, step)
                operations += [Reduce(operands, (partial,)), Send(partial, (right,))]
        return (tuple(operations),)

    return Program(
        "ring",
        Collective.REDUCE_SCATTER,
        ranks,
        chunks=1,
        sends=max(ranks - 1, 1),
        lanes=lanes,
        scratch_chunks=max(ranks - 2, 0),
        period=1,
    )
