"""Recursive doubling: partners exchange all they have, so each step doubles the number of ranks
summed.

    0 1 | 2 3     first 0 with 1 and 2 with 3, then 0 with 2 and 1 with 3

ceil(log2 n) steps, each of the whole data: for small messages between hosts, where each message
costs its sender and its receiver more than its bytes do. The ranks are split as in
halving_doubling.py; if a half has one rank more, that rank receives from the last of the other
half, and sends to nobody. Both halves combine the left half's sum with the right one's, in that
order, so all ranks get the same bits. Source: R. Thakur, R. Rabenseifner, W. Gropp, Int. J. High
Perf. Comput. Appl. 19 (2005) 49-66.
"""

from __future__ import annotations

from rallypoint.schedule.algorithms import direct
from rallypoint.schedule.algorithms.halving_doubling import splits
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
)


def all_reduce(ranks: int) -> Program:
    """Combine halves of halves, the smallest first."""
    if ranks == 1:
        return direct.all_reduce_one_shot(1)

    def lanes(rank: int) -> tuple[Lane, ...]:
        operations: list[Operation] = []
        value = Chunks(Buffer.INPUT, 0)
        ways = splits(rank, ranks)
        for step, split in enumerate(reversed(ways)):
            if split.partners:
                operations.append(Send(value, split.partners))
            theirs = Incoming(split.partner)
            operands = (value, theirs) if split.kept < split.given else (theirs, value)
            is_last = step == len(ways) - 1
            value = Chunks(Buffer.OUTPUT, 0) if is_last else Chunks(Buffer.SCRATCH, step)
            operations.append(Reduce(operands, (value,)))
        return (tuple(operations),)

    steps = (ranks - 1).bit_length()
    return Program(
        "recursive_doubling",
        Collective.ALL_REDUCE,
        ranks,
        chunks=1,
        sends=steps,
        lanes=lanes,
        scratch_chunks=steps - 1,
        copies=True,
    )
