"""Binary trees in order: smaller ranks on the left, larger ones on the right. One, or two at once.

             7                  rank r is as high as r + 1 has zeros at its end, and its
       3          11            children are r - 2^(height - 1) and r + 2^(height - 1);
     1   5      9    13         where a right child is missing, the next one down its left
    0 2 4 6    8 10 12 14       edge takes its place

It takes log2 n steps up and as many down, but each rank communicates with only three others,
whatever n is. For large messages, with many pieces in flight, each rank therefore moves three times
the data, not log2 n times.

One tree leaves half of the capacity unused: leaves receive but do not send. A second tree for half
of the data, whose inner ranks are the first one's leaves, uses the other half. Each rank then sends
and receives each byte about twice, as in a ring, but in 2 log2 n steps instead of 2 (n - 1).

double_tree, 8 ranks: rank 0 above an in-order     two_tree, 8 ranks: rank 0 above two in-order
tree, and its mirror image                         trees of the others, one shifted by one

    0 ------- 4               7 ------- 3               0 ------- 4            0 ------- 5
          2       6                 5       1                 2       6              3       7
        1   3   5   7             6   4   2   0             1   3   5   7          2   4   6   1

In-order trees have their leaves at the even positions (counted from 0). Mirroring an even number of
positions and shifting by one both turn even into odd. So no rank is an inner rank of both trees,
except the root of the second kind, and one rank of the first kind if n is odd.

double_tree   as NCCL does it (src/graph/trees.cc): mirrored for even n, shifted by one for odd n
two_tree      P. Sanders, J. Speck, J. L. Traeff, Parallel Computing 35 (2009) 581-594; any root
"""

from __future__ import annotations

from functools import partial

from rallypoint.schedule.algorithms import tree
from rallypoint.schedule.algorithms.tree import Tree


def in_order(ranks: int) -> Tree:
    """The tree over `ranks` ranks."""

    def children(rank: int) -> tuple[int, ...]:
        step = _lowest_bit(rank + 1) // 2
        left = (rank - step,) if step else ()
        while step and rank + step >= ranks:
            step //= 2
        return (*left, rank + step) if step else left

    def parent(rank: int) -> int:
        step = _lowest_bit(rank + 1)
        # Its parent on the right or, if there is none, on the left.
        above = ((rank + 1) ^ step | step << 1) - 1
        return above if above < ranks else rank - step

    return Tree((1 << ranks.bit_length() - 1) - 1, parent, children)


def _lowest_bit(number: int) -> int:
    """12 -> 4."""
    return number & -number


def nccl_trees(ranks: int) -> tuple[Tree, Tree]:
    """Rank 0 above an in-order tree of the others, and its complement."""
    first = _below(0, in_order(ranks - 1)) if ranks > 1 else in_order(1)
    return first, _complement(first, ranks)


def sanders_trees(ranks: int) -> tuple[Tree, Tree]:
    """Rank 0 above two in-order trees of the others."""
    if ranks == 1:
        return in_order(1), in_order(1)
    inner = in_order(ranks - 1)
    return _below(0, inner), _below(0, _complement(inner, ranks - 1))


def _below(root: int, inner: Tree) -> Tree:
    """`root` (0) above a tree whose ranks are shifted by one to make room."""

    def parent(rank: int) -> int:
        return root if rank - 1 == inner.root else inner.parent(rank - 1) + 1

    def children(rank: int) -> tuple[int, ...]:
        if rank == root:
            return (inner.root + 1,)
        return tuple(child + 1 for child in inner.children(rank - 1))

    return Tree(root, parent, children)


def _complement(shape: Tree, ranks: int) -> Tree:
    """The mirror image if the number of ranks is even, the shift by one if it is odd."""
    if ranks % 2 == 1:
        return tree.turned(shape, ranks, (shape.root + 1) % ranks)
    last = ranks - 1
    return Tree(
        last - shape.root,
        lambda rank: last - shape.parent(last - rank),
        lambda rank: tuple(last - child for child in shape.children(last - rank)),
    )


def _one(ranks: int) -> tuple[Tree]:
    return (in_order(ranks),)


all_reduce = partial(tree.all_reduce, "binary_tree", _one)
reduce = partial(tree.reduce, "binary_tree", _one)
broadcast = partial(tree.broadcast, "binary_tree", _one)
double_all_reduce = partial(tree.all_reduce, "double_tree", nccl_trees)
two_all_reduce = partial(tree.all_reduce, "two_tree", sanders_trees)
two_reduce = partial(tree.reduce, "two_tree", sanders_trees)
two_broadcast = partial(tree.broadcast, "two_tree", sanders_trees)
