"""Algorithms that know which ranks share a node, so that less goes across, where it is slower.

all_reduce       1. inside each node, rank l reduces part l of everybody's data      (direct)
                 2. across nodes, the ranks l of all nodes reduce part l             (ring)
                 3. inside each node, everybody gets every part                      (direct)
broadcast        root -> its node, and one rank of each other node -> the others there
reduce           the same in the other direction
all_gather       each rank -> its node, and the rank with the same number on each other node, which
                 shares what comes with its own node; by three lanes, so that no ranks wait in a
                 circle
reduce_scatter   inside a node, rank l reduces what the node has for the ranks l elsewhere, and
                 sends it to them
barrier          inside the nodes to their first ranks, among those, and back

node_ring        all_reduce as a ring of nodes, a chain through each: chunk c starts at node c, goes
                 from rank to rank and node to node, and when it has been everywhere returns the
                 same way

                 node 0        node 1        node 2
                 0 -> 1 -> 2 = 3 -> 4 -> 5 = 6 -> 7 -> 8 = to rank 0
                 0 <- 1 <- 2 = 3 <- 4 <- 5 = 6 <- 7 <- 8 = from rank 0

Nodes hold `per_node` consecutive ranks. The last one may have fewer for node_ring, barrier, and
collectives with a root. All use both directions of the links. An all_reduce takes 2 (N - 1) steps
across for N nodes; in the other collectives each byte crosses between two nodes only once. Trees
with chains inside nodes are in tree.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from rallypoint.schedule.algorithms import direct, ring, tree
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Lane,
    Operation,
    Program,
    ProgramError,
    Reduce,
    Send,
    copy,
    receive,
)

NAME = "two_level"


def _full_nodes(ranks: int, per_node: int) -> int:
    """The number of nodes."""
    if ranks % per_node:
        raise ProgramError(f"two_level: {ranks} ranks do not fill nodes of {per_node}")
    return ranks // per_node


def _others_here(rank: int, per_node: int) -> tuple[int, ...]:
    """The other ranks of its node, which is full."""
    start = rank // per_node * per_node
    return tuple(start + other for other in direct.others(rank - start, per_node))


def _node_operands(rank: int, per_node: int, own: Chunks) -> tuple[Chunks | Incoming, ...]:
    """The operands of a reduction of the node's data, in the order of ranks."""
    start = rank // per_node * per_node
    members = range(start, start + per_node)
    return tuple(own if member == rank else Incoming(member) for member in members)


def all_reduce(ranks: int, per_node: int = 1) -> Program:
    """Reduce parts inside the nodes, run a ring for each part across nodes, distribute parts inside
    the nodes.

    There are three lanes: what a rank sends to its node, its part of the ring, and what it receives
    from its node. A rank adds its node's data to a chunk in the same operation that receives it
    from the ring.
    """
    nodes = _full_nodes(ranks, per_node)
    if ranks == 1:
        return direct.all_reduce_one_shot(1)

    def lanes(rank: int) -> tuple[Lane, ...]:
        peers = _others_here(rank, per_node)
        node, local_rank = divmod(rank, per_node)

        def chunk(buffer: Buffer, owner: int, distance: int) -> Chunks:
            """The chunk of an owner's part that starts that many nodes to the left."""
            return Chunks(buffer, owner % per_node * nodes + (node - distance) % nodes)

        given: Lane = tuple(
            Send(chunk(Buffer.INPUT, peer, distance), (peer,))
            for distance in range(nodes)
            for peer in sorted(peers)
        )
        taken: Lane = tuple(
            receive(peer, chunk(Buffer.OUTPUT, peer, distance), lane=1)
            for distance in (nodes - 1, *range(nodes - 1))  # in the order of completion
            for peer in peers
        )
        across = tuple(_across(rank, ranks, per_node, partial(chunk, owner=local_rank)))
        return (given, across, taken) if peers else (across,)

    sends = max(2 * nodes - 1, nodes * (per_node - 1))
    return Program(NAME, Collective.ALL_REDUCE, ranks, chunks=ranks, sends=sends, lanes=lanes)


def _across(
    rank: int, ranks: int, per_node: int, chunk: Callable[..., Chunks]
) -> Iterator[Operation]:
    """A ring (as in ring.py) over the ranks with the same local rank; complete chunks also go to
    the node.
    """
    nodes = ranks // per_node
    left, right = (rank - per_node) % ranks, (rank + per_node) % ranks
    peers = _others_here(rank, per_node)
    lane = 1 if peers else 0
    for distance in range(nodes):
        own, result = (chunk(each, distance=distance) for each in (Buffer.INPUT, Buffer.OUTPUT))
        sums = _node_operands(rank, per_node, own)
        if distance > 0:
            sums = (Incoming(left, lane), *sums)
        if len(sums) > 1:
            yield Reduce(sums, (result,))
        is_complete = distance == nodes - 1
        to = (right,) * (nodes > 1) + peers * is_complete
        yield Send(result if len(sums) > 1 else own, to)
    for distance in range(nodes - 1):
        result = chunk(Buffer.OUTPUT, distance=distance)
        yield receive(left, result, lane=lane)
        if to := (right,) * (distance < nodes - 2) + peers:
            yield Send(result, to)


def node_ring(ranks: int, per_node: int = 1) -> Program:
    """One chunk for each node, with a lane for each direction."""
    nodes = -(-ranks // per_node)
    if ranks <= 2 and nodes == ranks:
        return replace(ring.all_reduce(ranks), name="node_ring")

    def turns(rank: int, chunk: int) -> bool:
        """Whether a chunk has been everywhere when it has been at this rank."""
        is_last = (rank + 1) % per_node == 0 or rank == ranks - 1
        return is_last and rank // per_node == (chunk - 1) % nodes

    def there(rank: int) -> Iterator[Operation]:
        left, right, node = (rank - 1) % ranks, (rank + 1) % ranks, rank // per_node
        for step in range(nodes):
            chunk = (node - step) % nodes
            own, result = Chunks(Buffer.INPUT, chunk), Chunks(Buffer.OUTPUT, chunk)
            if step == 0 and rank % per_node == 0:
                yield Send(own, (right,))
                continue
            yield Reduce((Incoming(left), own), (result,))
            yield Send(result, (left if turns(rank, chunk) else right,))

    def back(rank: int) -> Iterator[Operation]:
        left, right, node = (rank - 1) % ranks, (rank + 1) % ranks, rank // per_node
        for step in range(1, nodes + 1):
            chunk = (node + step) % nodes
            result = Chunks(Buffer.OUTPUT, chunk)
            if turns(rank, chunk):
                continue
            yield receive(right, result, lane=0 if turns(right, chunk) else 1)
            if rank != chunk * per_node:
                yield Send(result, (left,))

    return Program(
        "node_ring",
        Collective.ALL_REDUCE,
        ranks,
        chunks=nodes,
        sends=nodes,
        period=0 if ranks % per_node else per_node,
        lanes=lambda rank: (tuple(there(rank)), tuple(back(rank))),
    )


def broadcast(ranks: int, root: int, per_node: int = 1) -> Program:
    """To the ranks of the root's node and one of each other node, which pass it on."""
    return tree.broadcast(NAME, lambda _: (_tree(ranks, root, per_node),), ranks, root)


def reduce(ranks: int, root: int, per_node: int = 1) -> Program:
    """Each node reduces its own data, and the root all nodes'."""
    return tree.reduce(NAME, lambda _: (_tree(ranks, root, per_node),), ranks, root)


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
    nodes = _full_nodes(ranks, per_node)

    def lanes(rank: int) -> tuple[Lane, ...]:
        node, local_rank = divmod(rank, per_node)
        here = _others_here(rank, per_node)
        away = tuple((rank + step * per_node) % ranks for step in range(1, nodes))
        own = Chunks(Buffer.INPUT, 0)
        give: list[Operation] = [Send(own, away + here)] if ranks > 1 else []
        give.append(copy(own, Chunks(Buffer.OUTPUT, rank)))
        share: list[Operation] = []
        take: list[Operation] = [receive(peer, Chunks(Buffer.OUTPUT, peer)) for peer in here]
        for step in range(1, nodes):
            source = (node - step) % nodes * per_node
            block = Chunks(Buffer.OUTPUT, source + local_rank)
            share.append(receive(source + local_rank, block))
            if here:
                share.append(Send(block, here))
            take += [
                receive(peer, Chunks(Buffer.OUTPUT, source + peer % per_node), lane=1)
                for peer in here
            ]
        return (tuple(give), tuple(share), tuple(take))

    sends = max(nodes - 1, 1)
    return Program(NAME, Collective.ALL_GATHER, ranks, chunks=1, sends=sends, lanes=lanes)


def reduce_scatter(ranks: int, per_node: int = 1) -> Program:
    """Each node's sums for the other nodes' ranks go there, with a lane for what comes from the own
    node.
    """
    nodes = _full_nodes(ranks, per_node)

    def lanes(rank: int) -> tuple[Lane, ...]:
        node, local_rank = divmod(rank, per_node)
        here = _others_here(rank, per_node)
        result = Chunks(Buffer.OUTPUT, 0)
        targets = [(node + step) % nodes * per_node for step in range(nodes)]
        given: Lane = tuple(
            Send(Chunks(Buffer.INPUT, target + peer % per_node), (peer,))
            for target in targets
            for peer in sorted(here)  # in order, so that one rank can have all that it waits for
        )

        def collected(target: int) -> tuple[Chunks | Incoming, ...]:
            return _node_operands(rank, per_node, Chunks(Buffer.INPUT, target + local_rank))

        sums: list[Operation] = [Reduce(collected(targets[0]), (result,))]
        lane = 1 if here else 0
        for step, target in enumerate(targets[1:]):
            partial_sum = Chunks(Buffer.INPUT, target + local_rank)
            if here:
                partial_sum = Chunks(Buffer.SCRATCH, step)
                sums.append(Reduce(collected(target), (partial_sum,)))
            sums.append(Send(partial_sum, (target + local_rank,)))
            source = (node - step - 1) % nodes * per_node + local_rank
            sums.append(Reduce((Incoming(source, lane), result), (result,)))
        return (given, tuple(sums)) if here else (tuple(sums),)

    return Program(
        NAME,
        Collective.REDUCE_SCATTER,
        ranks,
        chunks=1,
        sends=max(nodes * (per_node - 1), nodes - 1, 1),
        lanes=lanes,
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

    return Program(NAME, Collective.BARRIER, ranks, chunks=1, sends=2, lanes=lanes)
