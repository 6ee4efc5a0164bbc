"""Collectives on nodes of several ranks, in which each byte crosses between two nodes only once.

broadcast        root -> its node, and one rank of each other node -> the others there
reduce           the same the other way
all_gather       each rank -> its node, and the rank of its place on each other node, which shares
                 what comes with its own node; by three lanes, so that nobody waits in a circle
reduce_scatter   inside a node, the rank of a place reduces what the node has for the ranks of that
                 place elsewhere, and sends it to them
barrier          inside the nodes to their first ranks, among those, and back

         node 0          node 1
         0 ------ 1      2 ------ 3          places 0 and 1 of two nodes
         +---------------+
                  +---------------+

Nodes hold `per_node` consecutive ranks. The last one may have fewer if the collective has a root;
otherwise all must be full. all_reduce on levels is in hierarchical.py.
"""

from __future__ import annotations

from collections.abc import Callable

from rallypoint.schedule.algorithms import tree
from rallypoint.schedule.algorithms.hierarchical import full_nodes, others_here
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


def broadcast(ranks: int, root: int, per_node: int = 1) -> Program:
    """To the ranks of the root's node and one of each other node, which pass it on."""
    return tree.broadcast("two_level", [_tree(ranks, root, per_node)], ranks)


def reduce(ranks: int, root: int, per_node: int = 1) -> Program:
    """Each node reduces its own data, and the root all nodes'."""
    return tree.reduce("two_level", [_tree(ranks, root, per_node)], ranks)


def _tree(ranks: int, root: int, per_node: int) -> tree.Tree:
    """The root above its node and the heads of the others, each head above its node."""

    def head(node: int) -> int:
        if node == root // per_node:
            return root
        return min(node * per_node + root % per_node, ranks - 1)

    def parent(rank: int) -> int:
        above = head(rank // per_node)
        return root if above == rank else above

    def children(rank: int) -> tuple[int, ...]:
        node = rank // per_node
        if rank != head(node):
            return ()
        last = min(ranks, (node + 1) * per_node)
        here = tuple(each for each in range(node * per_node, last) if each != rank)
        if rank != root:
            return here
        nodes = -(-ranks // per_node)
        heads = tuple(head((node + step) % nodes) for step in range(1, nodes))
        return heads + here  # the slower ones first

    return tree.Tree(root, parent, children)


def all_gather(ranks: int, per_node: int = 1) -> Program:
    """Each rank's block goes to its whole node and one rank of each other, which passes it on to
    its node.
    """
    nodes = full_nodes(ranks, per_node)

    def lanes(rank: int) -> tuple[Lane, ...]:
        node, place = divmod(rank, per_node)
        here = others_here(rank, per_node)
        away = tuple((rank + step * per_node) % ranks for step in range(1, nodes))
        own = Chunks(Buffer.INPUT, 0)
        give: list[Operation] = [Send(own, away + here)] if ranks > 1 else []
        give.append(copy(own, Chunks(Buffer.OUTPUT, rank)))
        share: list[Operation] = []
        take: list[Operation] = [receive(peer, Chunks(Buffer.OUTPUT, peer)) for peer in here]
        for step in range(1, nodes):
            source = (node - step) % nodes * per_node
            block = Chunks(Buffer.OUTPUT, source + place)
            share.append(receive(source + place, block))
            if here:
                share.append(Send(block, here))
            take += [
                receive(peer, Chunks(Buffer.OUTPUT, source + peer % per_node), lane=1)
                for peer in here
            ]
        return (tuple(give), tuple(share), tuple(take))

    return _program(Collective.ALL_GATHER, ranks, lanes, sends=max(nodes - 1, 1))


def reduce_scatter(ranks: int, per_node: int = 1) -> Program:
    """Each node's sums for the other nodes' ranks go there, with a lane for what comes from the own
    node.
    """
    nodes = full_nodes(ranks, per_node)

    def lanes(rank: int) -> tuple[Lane, ...]:
        node, place = divmod(rank, per_node)
        start = node * per_node
        here = others_here(rank, per_node)
        result = Chunks(Buffer.OUTPUT, 0)
        targets = [(node + step) % nodes * per_node for step in range(nodes)]
        given: Lane = tuple(
            Send(Chunks(Buffer.INPUT, target + peer % per_node), (peer,))
            for target in targets
            for peer in sorted(here)  # in order, so that one rank can have all that it waits for
        )

        def collected(target: int) -> tuple[Chunks | Incoming, ...]:
            own = Chunks(Buffer.INPUT, target + place)
            members = range(start, start + per_node)
            return tuple(own if member == rank else Incoming(member) for member in members)

        sums: list[Operation] = [Reduce(collected(start), (result,))]
        lane = 1 if here else 0
        for step, target in enumerate(targets[1:]):
            partial = Chunks(Buffer.INPUT, target + place)
            if here:
                partial = Chunks(Buffer.SCRATCH, step)
                sums.append(Reduce(collected(target), (partial,)))
            sums.append(Send(partial, (target + place,)))
            source = (node - step - 1) % nodes * per_node + place
            sums.append(Reduce((Incoming(source, lane), result), (result,)))
        return (given, tuple(sums)) if here else (tuple(sums),)

    return _program(
        Collective.REDUCE_SCATTER,
        ranks,
        lanes,
        sends=max(nodes * (per_node - 1), nodes - 1, 1),
        scratch_chunks=nodes - 1 if per_node > 1 else 0,
    )


def barrier(ranks: int, per_node: int = 1) -> Program:
    """The first rank of each node represents it."""
    nodes = -(-ranks // per_node)
    nothing = Chunks(Buffer.INPUT, 0)

    def lanes(rank: int) -> tuple[Lane, ...]:
        head = rank // per_node * per_node
        if rank != head:
            return ((Send(nothing, (head,)), Reduce((Incoming(head),), ())),)
        here = tuple(range(head + 1, min(ranks, head + per_node)))
        heads = tuple((head // per_node + step) % nodes * per_node for step in range(1, nodes))
        operations: list[Operation] = []
        if here:
            operations.append(Reduce(tuple(Incoming(peer) for peer in here), ()))
        if heads:
            operations.append(Send(nothing, heads))
            operations.append(Reduce(tuple(Incoming(peer) for peer in heads), ()))
        if here:
            operations.append(Send(nothing, here))
        return (tuple(operations),)

    return _program(Collective.BARRIER, ranks, lanes, sends=2)


def _program(
    collective: Collective,
    ranks: int,
    lanes: Callable[[int], tuple[Lane, ...]],
    *,
    sends: int,
    scratch_chunks: int = 0,
) -> Program:
    return Program(
        "two_level",
        collective,
        ranks,
        chunks=1,
        sends=sends,
        lanes=lanes,
        scratch_chunks=scratch_chunks,
    )
