"""Algorithms that know which ranks share a node, so that less goes across, where it is slower.

two_level    1. inside each node, rank l reduces part l of everybody's data      (direct)
             2. across nodes, the ranks l of all nodes reduce part l             (ring)
             3. inside each node, everybody gets every part                      (direct)

node_ring    a ring of nodes, a chain through each: chunk c starts at node c, goes from rank to rank
             and node to node, and when it has been everywhere returns the same way

             node 0        node 1        node 2
             0 -> 1 -> 2 = 3 -> 4 -> 5 = 6 -> 7 -> 8 = to rank 0
             0 <- 1 <- 2 = 3 <- 4 <- 5 = 6 <- 7 <- 8 = from rank 0

Nodes hold `per_node` consecutive ranks. two_level needs all nodes full; node_ring takes a last node
with fewer. Both directions of the links are used, and one message at a time crosses between two
nodes: 2 (N - 1) steps across for N nodes. Trees with chains inside nodes are in tree.py,
other collectives on levels in two_level.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from rallypoint.schedule.algorithms import direct, ring
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
    receive,
)


def full_nodes(ranks: int, per_node: int) -> int:
    """The number of nodes."""
    if ranks % per_node:
        raise ProgramError(f"two_level: {ranks} ranks do not fill nodes of {per_node}")
    return ranks // per_node


def others_here(rank: int, per_node: int) -> tuple[int, ...]:
    """The other ranks of its node, which is full."""
    start = rank // per_node * per_node
    return tuple(start + other for other in direct.others(rank - start, per_node))


def two_level(ranks: int, per_node: int = 1) -> Program:
    """Reduce parts inside the nodes, run a ring for each part across nodes, distribute parts inside
    the nodes.

    There are three lanes: what a rank sends to its node, its part of the ring, and what it receives
    from its node. A rank adds its node's data to a chunk in the same operation that receives it
    from the ring.
    """
    nodes = full_nodes(ranks, per_node)
    if ranks == 1:
        return direct.all_reduce_one_shot(1)

    def lanes(rank: int) -> tuple[Lane, ...]:
        peers = others_here(rank, per_node)
        node, place = divmod(rank, per_node)

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
        across = tuple(_across(rank, ranks, per_node, partial(chunk, owner=place)))
        return (given, across, taken) if peers else (across,)

    return Program(
        "two_level",
        Collective.ALL_REDUCE,
        ranks,
        chunks=ranks,
        sends=max(2 * nodes - 1, nodes * (per_node - 1)),
        lanes=lanes,
    )


def _across(
    rank: int, ranks: int, per_node: int, chunk: Callable[..., Chunks]
) -> Iterator[Operation]:
    """A ring (as in ring.py) over the ranks with the same local rank; complete chunks also go to
    the node.
    """
    nodes = ranks // per_node
    start = rank // per_node * per_node
    left, right = (rank - per_node) % ranks, (rank + per_node) % ranks
    peers = others_here(rank, per_node)
    lane = 1 if peers else 0
    for distance in range(nodes):
        own, result = (chunk(each, distance=distance) for each in (Buffer.INPUT, Buffer.OUTPUT))
        members = range(start, start + per_node)
        sums = [own if member == rank else Incoming(member) for member in members]
        if distance > 0:
            sums.insert(0, Incoming(left, lane))
        if len(sums) > 1:
            yield Reduce(tuple(sums), (result,))
        is_complete = distance == nodes - 1
        to = (right,) * (nodes > 1) + peers * is_complete
        yield Send(result if len(sums) > 1 else own, to)
    for distance in range(nodes - 1):
        result = chunk(Buffer.OUTPUT, distance=distance)
        yield receive(left, result, lane=lane)
        if to := (right,) * (distance < nodes - 2) + peers:
            yield Send(result, to)


def node_ring(ranks: int, per_node: int = 1) -> Program:
    """One chunk for each node; the way there and the way back have a lane each."""
    nodes = -(-ranks // per_node)
    if ranks <= 2 and nodes == ranks:
        return replace(ring.all_reduce(ranks), name="node_ring")

    def ends(rank: int, chunk: int) -> bool:
        """Whether a chunk has been everywhere when it has been at this rank."""
        return _is_last(rank, ranks, per_node) and rank // per_node == (chunk - 1) % nodes

    def there(rank: int) -> Iterator[Operation]:
        left, right, node = (rank - 1) % ranks, (rank + 1) % ranks, rank // per_node
        for step in range(nodes):
            chunk = (node - step) % nodes
            own, result = Chunks(Buffer.INPUT, chunk), Chunks(Buffer.OUTPUT, chunk)
            if step == 0 and rank % per_node == 0:
                yield Send(own, (right,))
                continue
            yield Reduce((Incoming(left), own), (result,))
            yield Send(result, (left if ends(rank, chunk) else right,))

    def back(rank: int) -> Iterator[Operation]:
        left, right, node = (rank - 1) % ranks, (rank + 1) % ranks, rank // per_node
        for step in range(1, nodes + 1):
            chunk = (node + step) % nodes
            result = Chunks(Buffer.OUTPUT, chunk)
            if ends(rank, chunk):
                continue
            yield receive(right, result, lane=0 if ends(right, chunk) else 1)
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


def _is_last(rank: int, ranks: int, per_node: int) -> bool:
    return (rank + 1) % per_node == 0 or rank == ranks - 1
