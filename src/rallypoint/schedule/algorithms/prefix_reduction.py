"""Prefixes: rank r gets the inputs of ranks 0 to r, combined in that order.

direct                0 -> 1,2,3   1 -> 2,3   2 -> 3     one step; each rank combines them itself
recursive_doubling    0 -> 1   1 -> 2   2 -> 3           first with the rank below,
                      0 ------> 2   1 ------> 3          then with two below, four below, ...
chain                 0 -> 1 -> 2 -> 3                   pieces follow each other down the line

The direct algorithm is for few ranks. Recursive doubling takes log2 n steps with the whole data,
for few bytes; in the chain each rank sends and receives the data once, for many bytes. Operands are
always neighbours, the lower ranks' on the left. Source: W. D. Hillis, G. L. Steele, Comm. ACM 29
(1986) 1170-1183.
"""

from __future__ import annotations

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
)

_OWN, _RESULT = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)


def direct(ranks: int) -> Program:
    """Every rank sends its input to all above it."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        operands: tuple[Chunks | Incoming, ...] = (*map(Incoming, range(rank)), _OWN)
        above = tuple(range(rank + 1, ranks))
        send = (Send(_OWN, above),) if above else ()
        return ((*send, Reduce(operands, (_RESULT,))),)

    return Program(
        "direct", Collective.SCAN, ranks, chunks=1, sends=1, lanes=lanes, copies=ranks > 1
    )


def recursive_doubling(ranks: int) -> Program:
    """Step k combines the range that ends here with the one that ends 2^k ranks below, until it
    begins at rank 0.
    """
    steps = (ranks - 1).bit_length()

    def lanes(rank: int) -> tuple[Lane, ...]:
        value = _OWN
        operations: list[Operation] = []
        for step in range(steps):
            below, above = rank - (1 << step), rank + (1 << step)
            if above < ranks:
                operations.append(Send(value, (above,)))
            if below >= 0:
                is_last = 2 << step > rank
                target = _RESULT if is_last else Chunks(Buffer.SCRATCH, step)
                operations.append(Reduce((Incoming(below), value), (target,)))
                value = target
        if rank == 0:
            operations.append(copy(_OWN, _RESULT))
        return (tuple(operations),)

    return Program(
        "recursive_doubling",
        Collective.SCAN,
        ranks,
        chunks=1,
        sends=max(steps, 1),
        lanes=lanes,
        scratch_chunks=max(steps - 1, 0),
        copies=ranks > 1,
    )


def chain(ranks: int) -> Program:
    """Every rank adds its input to what comes from below, and passes it on."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        operands: tuple[Chunks | Incoming, ...] = (_OWN,)
        if rank > 0:
            operands = (Incoming(rank - 1), _OWN)
        send = (Send(_RESULT, (rank + 1,)),) if rank + 1 < ranks else ()
        return ((Reduce(operands, (_RESULT,)), *send),)

    return Program("chain", Collective.SCAN, ranks, chunks=1, sends=1, lanes=lanes)
