"""Direct algorithms: every rank talks to every other, in one or two steps.

one shot      0 -> 1,2,3   1 -> 0,2,3   ...      each rank reduces everything itself
two shots     chunk c of every rank -> rank c, which reduces it and sends the result to all

One shot moves n - 1 times the data but waits once; two shots move twice (n - 1) / n of it and
wait twice. Operands are reduced in rank order, so all ranks get the same bits.
"""

from __future__ import annotations

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


def others(rank: int, ranks: int) -> tuple[int, ...]:
    """The other ranks, beginning with the next one, so that not all start at the same peer."""
    return tuple((rank + step) % ranks for step in range(1, ranks))


def _in_rank_order(rank: int, ranks: int, own: Chunks) -> tuple[Chunks | Incoming, ...]:
    return tuple(own if peer == rank else Incoming(peer) for peer in range(ranks))


def all_reduce_one_shot(ranks: int) -> Program:
    """Every rank sends its input to all and reduces all inputs itself."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own = Chunks(Buffer.INPUT, 0)
        reduce = Reduce(_in_rank_order(rank, ranks, own), (Chunks(Buffer.OUTPUT, 0),))
        return ((Send(own, others(rank, ranks)), reduce),) if ranks > 1 else ((reduce,),)

    return Program("direct_one_shot", Collective.ALL_REDUCE, ranks, chunks=1, sends=1, lanes=lanes)


def all_reduce_two_shot(ranks: int) -> Program:
    """Rank c reduces chunk c for all, then hands the result to all."""
    if ranks == 1:
        return all_reduce_one_shot(1)

    def lanes(rank: int) -> tuple[Lane, ...]:
        peers = others(rank, ranks)
        result = Chunks(Buffer.OUTPUT, rank)
        operations: list[Operation] = [Send(Chunks(Buffer.INPUT, peer), (peer,)) for peer in peers]
        operations.append(
            Reduce(_in_rank_order(rank, ranks, Chunks(Buffer.INPUT, rank)), (result,))
        )
        operations.append(Send(result, peers))
        operations += [receive(peer, Chunks(Buffer.OUTPUT, peer)) for peer in peers]
        return (tuple(operations),)

    return Program(
        "direct_two_shot", Collective.ALL_REDUCE, ranks, chunks=ranks, sends=ranks, lanes=lanes
    )


def broadcast(ranks: int, root: int) -> Program:
    """The root sends its input to all."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own, result = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)
        if rank != root:
            return ((receive(root, result),),)
        keep = copy(own, result)
        return ((Send(own, others(root, ranks)), keep),) if ranks > 1 else ((keep,),)

    return Program("direct", Collective.BROADCAST, ranks, chunks=1, sends=1, lanes=lanes)


def all_gather(ranks: int) -> Program:
    """Every rank sends its input to all."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own, peers = Chunks(Buffer.INPUT, 0), others(rank, ranks)
        send = (Send(own, peers),) if peers else ()
        keep = copy(own, Chunks(Buffer.OUTPUT, rank))
        return ((*send, keep, *(receive(peer, Chunks(Buffer.OUTPUT, peer)) for peer in peers)),)

    return Program("direct", Collective.ALL_GATHER, ranks, chunks=1, sends=1, lanes=lanes)


def barrier(ranks: int) -> Program:
    """Every rank tells all that it has come, and waits for all."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        peers = others(rank, ranks)
        if not peers:
            return ((),)
        arrived = Reduce(tuple(Incoming(peer) for peer in peers), ())
        return ((Send(Chunks(Buffer.INPUT, 0), peers), arrived),)

    return Program("direct", Collective.BARRIER, ranks, chunks=1, sends=1, lanes=lanes)


def send() -> Program:
    """Rank 0 of a pair sends to rank 1."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        if rank == 0:
            return ((Send(Chunks(Buffer.INPUT, 0), (1,)),),)
        return ((receive(0, Chunks(Buffer.OUTPUT, 0)),),)

    return Program("direct", Collective.SEND, 2, chunks=1, sends=1, lanes=lanes)
