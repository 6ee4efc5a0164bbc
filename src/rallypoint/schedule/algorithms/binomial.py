"""The binomial tree: rank r's children are r + 1, r + 2, r + 4, ... up to r's lowest bit.

    0 --+-- 1
        +-- 2 -- 3               a child's ranks are consecutive: r + 4 has r + 4 .. r + 7
        +-- 4 --+-- 5
                +-- 6 -- 7

ceil(log2 n) steps. Good for small messages, and for gather and scatter, where each rank handles
only the blocks of its own subtree. For another root the tree is rotated: all ranks are counted from
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from rallypoint.schedule.algorithms import tree
from rallypoint.schedule.algorithms.tree import Tree
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Lane,
    Operation,
    Program,
    Send,
    copy,
    receive,
)

NAME = "binomial_tree"


def trees(ranks: int) -> tuple[Tree]:
    """The tree with root 0."""

    def children(rank: int) -> tuple[int, ...]:
        reach = rank & -rank if rank else ranks
        steps = (1 << bit for bit in range((reach - 1).bit_length()))
        return tuple(rank + step for step in steps if rank + step < ranks)

    return (Tree(0, lambda rank: rank & (rank - 1), children),)


all_reduce = partial(tree.all_reduce, NAME, trees)
reduce = partial(tree.reduce, NAME, trees)
broadcast = partial(tree.broadcast, NAME, trees)


def size(rank: int, ranks: int) -> int:
    """The number of ranks in the subtree below a rank, including itself."""
    return min(rank & -rank, ranks - rank) if rank else ranks


def scatter(ranks: int, root: int) -> Program:
    """Each rank gets the blocks of its subtree, keeps its own and passes on the others."""
    (whole,) = trees(ranks)

    def lanes(rank: int) -> tuple[Lane, ...]:
        position = (rank - root) % ranks
        blocks = _Blocks(Buffer.INPUT, position, root, ranks)
        result = Chunks(Buffer.OUTPUT, 0)
        parent = (whole.parent(position) + root) % ranks
        if position and size(position, ranks) == 1:
            return ((receive(parent, result),),)
        operations: list[Operation] = []
        if position:
            operations += [receive(parent, blocks.at(*span)) for span in blocks.below(position)]
        for child in reversed(whole.children(position)):
            to = ((child + root) % ranks,)
            operations += [Send(blocks.at(*span), to) for span in blocks.below(child)]
        operations.append(copy(blocks.at(position, 1), result))
        return (tuple(operations),)

    sends = (ranks - 1).bit_length() + 1  # one to each child, and one more where blocks wrap round
    return _program(Collective.SCATTER, ranks, root, lanes, sends)


def gather(ranks: int, root: int) -> Program:
    """Each rank collects the blocks of its subtree, and sends them to its parent."""
    (whole,) = trees(ranks)

    def lanes(rank: int) -> tuple[Lane, ...]:
        position = (rank - root) % ranks
        blocks = _Blocks(Buffer.OUTPUT, position, root, ranks)
        own = Chunks(Buffer.INPUT, 0)
        to = ((whole.parent(position) + root) % ranks,)
        if position and size(position, ranks) == 1:
            return ((Send(own, to),),)
        operations: list[Operation] = [copy(own, blocks.at(position, 1))]
        for child in whole.children(position):
            peer = (child + root) % ranks
            operations += [receive(peer, blocks.at(*span)) for span in blocks.below(child)]
        if position:
            operations += [Send(blocks.at(*span), to) for span in blocks.below(position)]
        return (tuple(operations),)

    return _program(Collective.GATHER, ranks, root, lanes, sends=2)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Where a rank at a position in the tree keeps the blocks of the positions below it."""

    outer: Buffer  # the root's buffer
    position: int
    root: int
    ranks: int

    def at(self, first: int, count: int) -> Chunks:
        """The blocks of consecutive positions."""
        if self.position == 0:
            return Chunks(self.outer, (first + self.root) % self.ranks, count)
        return Chunks(Buffer.SCRATCH, first - self.position, count)

    def below(self, position: int) -> Iterator[tuple[int, int]]:
        """The positions below one, including itself, split where the root's blocks wrap round."""
        end, wrap = position + size(position, self.ranks), self.ranks - self.root
        if position < wrap < end:
            yield position, wrap - position
            yield wrap, end - wrap
        else:
            yield position, end - position


def _program(
    collective: Collective,
    ranks: int,
    root: int,
    lanes: Callable[[int], tuple[Lane, ...]],
    sends: int,
) -> Program:
    most = max((size(1 << bit, ranks) for bit in range((ranks - 1).bit_length())), default=0)
    return Program(
        NAME,
        collective,
        ranks,
        chunks=1,
        sends=sends,
        lanes=lanes,
        scratch_chunks=most,
        span=max(most, 1),
        root=root,
    )
