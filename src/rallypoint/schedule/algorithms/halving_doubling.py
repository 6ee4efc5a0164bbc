"""Recursive halving and doubling, for any number of ranks.

    0 1 2 3 | 4 5 6     halving: split the ranks in two; each sends to its partner in the other
    0 1 | 2 3           half what belongs to that half, and reduces what it gets; then the same
    0 | 1               inside each half, until rank r has chunk r of everybody.
                        doubling: the same backwards, with finished chunks.
                        recursive_doubling: only backwards; partners exchange all they have, so
                        each step doubles the number of ranks summed.

If the left half has one rank more (3 above), that rank has no partner: it sends to the
last of the right half, and receives from it when doubling. Partners exchange half of the data, then
a quarter, and so on: ceil(log2 n) steps and (n - 1) / n of the data each way, the least of both.
Source: R. Thakur, R. Rabenseifner, W. Gropp, Int. J. High Perf. Comput. Appl. 19 (2005) 49-66, who
fold the ranks beyond a power of two; splitting unevenly needs no fold.

Recursive doubling takes ceil(log2 n) steps, each of the whole data: for small messages between
hosts, where each message costs its sender and its receiver more than its bytes do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

NAME = "halving_doubling"


@dataclass(frozen=True, slots=True)
class Split:
    """One split, as one rank sees it.

    Attributes:
        kept: the ranks of its own half, as (first, end), end excluded.
        given: the ranks of the other half.
        partner: the rank of the other half that it sends to when halving.
        partners: the ranks that send to it when halving; none, one or two.
    """

    kept: tuple[int, int]
    given: tuple[int, int]
    partner: int
    partners: tuple[int, ...]


def splits(rank: int, ranks: int) -> list[Split]:
    """The splits of a rank, the largest first."""
    result = []
    first, end = 0, ranks
    while end - first > 1:
        middle = first + (end - first + 1) // 2
        left, right = middle - first, end - middle
        if rank < middle:
            position = rank - first
            partner = middle + min(position, right - 1)
            partners: tuple[int, ...] = (partner,) if position < right else ()
            result.append(Split((first, middle), (middle, end), partner, partners))
            end = middle
        else:
            position = rank - middle
            extra = left > right and position == right - 1
            partners = (first + position, first + position + 1) if extra else (first + position,)
            result.append(Split((middle, end), (first, middle), first + position, partners))
            first = middle
    return result


def all_reduce(ranks: int) -> Program:
    """Halving, then doubling, in the output."""
    if ranks == 1:
        return direct.all_reduce_one_shot(1)

    def lanes(rank: int) -> tuple[Lane, ...]:
        rounds = splits(rank, ranks)
        return ((*_halve(rank, rounds, Buffer.OUTPUT), *_double(rounds)),)

    sends = 2 * (ranks - 1).bit_length()
    return Program(
        NAME,
        Collective.ALL_REDUCE,
        ranks,
        chunks=ranks,
        sends=sends,
        lanes=lanes,
        span=(ranks + 1) // 2,
    )


def reduce_scatter(ranks: int) -> Program:
    """Halving, with partial sums in scratch memory."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own, result = Chunks(Buffer.INPUT, rank), Chunks(Buffer.OUTPUT, 0)
        if ranks == 1:
            return ((copy(own, result),),)
        *before, last = _halve(rank, splits(rank, ranks), Buffer.SCRATCH)
        assert isinstance(last, Reduce)
        return ((*before, Reduce(last.operands, (result,))),)

    return Program(
        NAME,
        Collective.REDUCE_SCATTER,
        ranks,
        chunks=1,
        sends=max((ranks - 1).bit_length(), 1),
        lanes=lanes,
        scratch_chunks=ranks,
        span=(ranks + 1) // 2,
    )


def all_gather(ranks: int) -> Program:
    """Only doubling."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own = copy(Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, rank))
        return ((own, *_double(splits(rank, ranks))),)

    sends = max((ranks - 1).bit_length(), 1)
    return Program(
        NAME,
        Collective.ALL_GATHER,
        ranks,
        chunks=1,
        sends=sends,
        lanes=lanes,
        span=(ranks + 1) // 2,
    )


def recursive_doubling(ranks: int) -> Program:
    """Combine halves of halves, the smallest first.

    Both halves combine the left half's sum with the right one's, in that order, so all ranks get
    the same bits. A rank without a partner sends to no rank.
    """
    if ranks == 1:
        return direct.all_reduce_one_shot(1)

    def lanes(rank: int) -> tuple[Lane, ...]:
        operations: list[Operation] = []
        value = Chunks(Buffer.INPUT, 0)
        rounds = splits(rank, ranks)
        for step, split in enumerate(reversed(rounds)):
            if split.partners:
                operations.append(Send(value, split.partners))
            theirs = Incoming(split.partner)
            operands = (value, theirs) if split.kept < split.given else (theirs, value)
            is_last = step == len(rounds) - 1
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


def _halve(rank: int, rounds: list[Split], partial: Buffer) -> Iterator[Operation]:
    """In the end, chunk `rank` of all ranks is in `partial`, at its own position."""
    held = Buffer.INPUT
    for split in rounds:
        yield Send(_span(held, split.given), (split.partner,))
        if split.partners:
            own = _span(held, split.kept)
            held = partial
            yield Reduce(
                tuple(own if p == rank else Incoming(p) for p in sorted((rank, *split.partners))),
                (_span(held, split.kept),),
            )


def _double(rounds: list[Split]) -> Iterator[Operation]:
    for split in reversed(rounds):
        if split.partners:
            yield Send(_span(Buffer.OUTPUT, split.kept), split.partners)
        yield receive(split.partner, _span(Buffer.OUTPUT, split.given))


def _span(buffer: Buffer, ranks: tuple[int, int]) -> Chunks:
    return Chunks(buffer, ranks[0], ranks[1] - ranks[0])
