"""Tree algorithms for any tree: values go up and are reduced, results come down.

        0          up lane:    wait for all children, reduce, send to the parent
       / \\         down lane:  wait for the parent, send to all children
      1   2        The root's up lane feeds the down lanes of its children.
     / \\
    3   4          Lanes run side by side, so piece 2 goes up while piece 1 comes down.

A rank reduces its children's values and its own in the order of ranks. If a tree has smaller ranks
on the left and larger ones on the right, the total order is 0, 1, 2, ... The trees themselves are
in binomial.py and binary_tree.py. With several trees, each carries a chunk of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True)
class Tree:
    """A tree of ranks.

    Attributes:
        root: the rank without a parent.
        parent: rank -> its parent; not called for the root.
        children: rank -> its children.
    """

    root: int
    parent: Callable[[int], int]
    children: Callable[[int], tuple[int, ...]]


Trees: TypeAlias = Callable[[int], Sequence[Tree]]  # number of ranks -> trees


def turned(tree: Tree, ranks: int, root: int) -> Tree:
    """The same tree, rotated so that `root` is its root."""
    shift = root - tree.root
    if shift == 0:
        return tree
    return Tree(
        root,
        lambda rank: (tree.parent((rank - shift) % ranks) + shift) % ranks,
        lambda rank: tuple((c + shift) % ranks for c in tree.children((rank - shift) % ranks)),
    )


def with_chains(tree: Tree, ranks: int, per_node: int) -> Tree:
    """A tree of nodes as a tree of ranks: inside each node a chain that ends at its first rank.

    5-4-3          nodes 0 and 1 with three ranks each; rank 0 is the root
        |
    2-1-0
    """

    def parent(rank: int) -> int:
        if rank % per_node:
            return rank - 1
        return tree.parent(rank // per_node) * per_node

    def children(rank: int) -> tuple[int, ...]:
        after = rank + 1
        chain = (after,) if after % per_node and after < ranks else ()
        if rank % per_node:
            return chain
        return (*chain, *(node * per_node for node in tree.children(rank // per_node)))

    return Tree(tree.root * per_node, parent, children)


def up(tree: Tree, rank: int, *, chunk: int, lane: int) -> Lane:
    """The lane that carries a chunk up to the root, where it becomes output.

    `lane` is this lane's number, the same on every rank.
    """
    own = Chunks(Buffer.INPUT, chunk)
    children = tree.children(rank)
    operands = tuple(
        own if peer == rank else Incoming(peer, lane) for peer in sorted((rank, *children))
    )
    if rank == tree.root:
        return (Reduce(operands, (Chunks(Buffer.OUTPUT, chunk),)),)
    to = (tree.parent(rank),)
    if not children:
        return (Send(own, to),)
    partial = Chunks(Buffer.SCRATCH, chunk)
    return (Reduce(operands, (partial,)), Send(partial, to))


def down(tree: Tree, rank: int, *, chunk: int, lane: int, root_lane: int) -> Lane:
    """The lane that carries the root's result down to all; `root_lane` is the lane that sends it
    there.
    """
    if rank == tree.root:
        return ()
    result = Chunks(Buffer.OUTPUT, chunk)
    parent, children = tree.parent(rank), tree.children(rank)
    operations: list[Operation] = [
        receive(parent, result, lane=root_lane if parent == tree.root else lane)
    ]
    if children:
        operations.append(Send(result, children))
    return tuple(operations)


def all_reduce(name: str, trees: Trees, ranks: int, per_node: int = 1) -> Program:
    """Reduce a chunk in each tree to its root, which sends the result back down; chains inside
    nodes.
    """
    nodes = -(-ranks // per_node)
    shapes = [with_chains(tree, ranks, per_node) for tree in trees(nodes)]

    def up_and_down(tree: Tree, rank: int, chunk: int) -> tuple[Lane, Lane]:
        rising = up(tree, rank, chunk=chunk, lane=2 * chunk)
        if rank == tree.root and tree.children(rank):
            rising = (*rising, Send(Chunks(Buffer.OUTPUT, chunk), tree.children(rank)))
        return rising, down(tree, rank, chunk=chunk, lane=2 * chunk + 1, root_lane=2 * chunk)

    def lanes(rank: int) -> tuple[Lane, ...]:
        return tuple(
            lane for chunk, tree in enumerate(shapes) for lane in up_and_down(tree, rank, chunk)
        )

    return _program(name, Collective.ALL_REDUCE, shapes, ranks, lanes)


def reduce(name: str, trees: Trees, ranks: int, root: int) -> Program:
    """Reduce a chunk in each tree, rotated to the root."""
    shapes = [turned(tree, ranks, root) for tree in trees(ranks)]

    def lanes(rank: int) -> tuple[Lane, ...]:
        return tuple(up(tree, rank, chunk=chunk, lane=chunk) for chunk, tree in enumerate(shapes))

    return _program(name, Collective.REDUCE, shapes, ranks, lanes)


def broadcast(name: str, trees: Trees, ranks: int, root: int) -> Program:
    """Send a chunk of the root's input down each tree, rotated to the root."""
    shapes = [turned(tree, ranks, root) for tree in trees(ranks)]

    def from_root(tree: Tree, chunk: int) -> Lane:
        own, children = Chunks(Buffer.INPUT, chunk), tree.children(tree.root)
        keep = copy(own, Chunks(Buffer.OUTPUT, chunk))
        return (Send(own, children), keep) if children else (keep,)

    def lanes(rank: int) -> tuple[Lane, ...]:
        return tuple(
            from_root(tree, chunk)
            if rank == root
            else down(tree, rank, chunk=chunk, lane=chunk, root_lane=chunk)
            for chunk, tree in enumerate(shapes)
        )

    return _program(name, Collective.BROADCAST, shapes, ranks, lanes)


def _program(
    name: str,
    collective: Collective,
    trees: Sequence[Tree],
    ranks: int,
    lanes: Callable[[int], tuple[Lane, ...]],
) -> Program:
    return Program(
        name,
        collective,
        ranks,
        chunks=len(trees),
        sends=1,
        lanes=lanes,
        scratch_chunks=0 if collective is Collective.BROADCAST else len(trees),
        root=trees[0].root if collective.has_root else 0,
        # When the root of a single tree has its result, all inputs have been read.
        restartable=len(trees) == 1 or collective is Collective.BROADCAST,
    )
