"""Two trees at once, each for half of the data, so that no rank works in both.

A binary tree leaves half of the capacity unused: leaves receive but do not send. A second tree,
whose inner ranks are the first one's leaves, uses the other half. Each rank then sends and receives
each byte about twice, as in a ring, but in 2 log2 n steps instead of 2 (n - 1).

nccl, 8 ranks: rank 0 above an in-order tree,      sanders, 8 ranks: rank 0 above two in-order
and its mirror image                               trees of the others, one shifted by one

    0 ------- 4               7 ------- 3               0 ------- 4            0 ------- 5
          2       6                 5       1                 2       6              3       7
        1   3   5   7             6   4   2   0             1   3   5   7          2   4   6   1

In-order trees have their leaves at the even positions (counted from 0). Mirroring an even number of
positions and shifting by one both turn even into odd. So nobody is an inner rank of both trees,
except the root of the second kind, and one rank of the first kind if n is odd.

nccl      as NCCL does it (src/graph/trees.cc): mirrored for even n, shifted by one for odd n
sanders   P. Sanders, J. Speck, J. L. Traeff, Parallel Computing 35 (2009) 581-594; any root
"""

from __future__ import annotations

from rallypoint.schedule.algorithms import binary_tree, tree
from rallypoint.schedule.algorithms.tree import Tree
from rallypoint.schedule.program import Program

NCCL, SANDERS = "double_tree", "two_tree"


def nccl_trees(ranks: int) -> list[Tree]:
    """Rank 0 above an in-order tree of the others, and its complement."""
    first = _below(0, binary_tree.shape(ranks - 1)) if ranks > 1 else binary_tree.shape(1)
    return [first, _complement(first, ranks)]


def sanders_trees(ranks: int) -> list[Tree]:
    """Rank 0 above two in-order trees of the others."""
    if ranks == 1:
        return [binary_tree.shape(1)] * 2
    inner = binary_tree.shape(ranks - 1)
    return [_below(0, inner), _below(0, _complement(inner, ranks - 1))]


def all_reduce(ranks: int, per_node: int = 1) -> Program:
    """NCCL's trees, with chains inside nodes."""
    nodes = -(-ranks // per_node)
    trees = [tree.with_chains(shape, ranks, per_node) for shape in nccl_trees(nodes)]
    return tree.all_reduce(NCCL, trees, ranks)


def sanders_all_reduce(ranks: int) -> Program:
    """Up and down both trees."""
    return tree.all_reduce(SANDERS, sanders_trees(ranks), ranks)


def sanders_reduce(ranks: int, root: int) -> Program:
    """Up both trees."""
    return tree.reduce(SANDERS, _turned(ranks, root), ranks)


def sanders_broadcast(ranks: int, root: int) -> Program:
    """Down both trees."""
    return tree.broadcast(SANDERS, _turned(ranks, root), ranks)


def _turned(ranks: int, root: int) -> list[Tree]:
    return [tree.turned(shape, ranks, root) for shape in sanders_trees(ranks)]


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
