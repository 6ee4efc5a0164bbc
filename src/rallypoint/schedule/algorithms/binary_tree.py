"""The binary tree in order: smaller ranks on the left, larger ones on the right.

             7                  rank r is as high as r + 1 has zeros at its end, and its
       3          11            children are r - 2^(height - 1) and r + 2^(height - 1);
     1   5      9    13         where a right child is missing, the next one down its left
    0 2 4 6    8 10 12 14       edge takes its place

It takes log2 n steps up and as many down, but each rank communicates with only three others,
whatever n is. For large messages, with many pieces in flight, each rank therefore moves three times
the data, not log2 n times.
"""

from __future__ import annotations

from rallypoint.schedule.algorithms import tree
from rallypoint.schedule.algorithms.tree import Tree
from rallypoint.schedule.program import Program

NAME = "binary_tree"


def shape(ranks: int) -> Tree:
    """The tree over `ranks` ranks."""

    def children(rank: int) -> tuple[int, ...]:
        step = lowest_bit(rank + 1) // 2
        left = (rank - step,) if step else ()
        while step and rank + step >= ranks:
            step //= 2
        return (*left, rank + step) if step else left

    def parent(rank: int) -> int:
        step = lowest_bit(rank + 1)
        # Its parent on the right or, if there is none, on the left.
        above = ((rank + 1) ^ step | step << 1) - 1
        return above if above < ranks else rank - step

    return Tree((1 << ranks.bit_length() - 1) - 1, parent, children)


def lowest_bit(number: int) -> int:
    """The lowest set bit: 12 -> 4."""
    return number & -number


def all_reduce(ranks: int, per_node: int = 1) -> Program:
    """Reduce to the root in the middle and broadcast; chains inside nodes."""
    nodes = -(-ranks // per_node)
    return tree.all_reduce(NAME, [tree.with_chains(shape(nodes), ranks, per_node)], ranks)


def reduce(ranks: int, root: int) -> Program:
    """Reduce to the root."""
    return tree.reduce(NAME, [tree.turned(shape(ranks), ranks, root)], ranks)


def broadcast(ranks: int, root: int) -> Program:
    """Broadcast from the root."""
    return tree.broadcast(NAME, [tree.turned(shape(ranks), ranks, root)], ranks)
