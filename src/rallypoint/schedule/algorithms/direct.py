"""Direct algorithms: every rank communicates with every other, in one or two steps.

one shot      0 -> 1,2,3   1 -> 0,2,3   ...      each rank reduces everything itself
two shots     chunk c of every rank -> rank c, which reduces it and sends the result to all
to a root     1,2,3 -> 0   (gather, reduce)      and from it: 0 -> 1,2,3 (broadcast, scatter)

One shot moves n - 1 times the data but waits only once; two shots move 2 (n - 1) / n of it and wait
twice. Operands are reduced in rank order, so all ranks get the same bits.
"""

from __future__ import annotations

from rallypoint.schedule.program import (
    SLOTS,
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Lane,
    Program,
    Reduce,
    Send,
    copy,
    receive,
)


def others(rank: int, ranks: int) -> tuple[int, ...]:
    """The other ranks, beginning with the next one, so that not all ranks start with the same
    peer.
    """
    return tuple((rank + step) % ranks for step in range(1, ranks))


def _in_rank_order(rank: int, ranks: int, own: Chunks) -> tuple[Chunks | Incoming, ...]:
    return tuple(own if peer == rank else Incoming(peer) for peer in range(ranks))


def _hand_out(rank: int, ranks: int) -> Lane:
    """Send to each other rank its chunk of the input."""
    return tuple(Send(Chunks(Buffer.INPUT, peer), (peer,)) for peer in range(ranks) if peer != rank)


def all_reduce_one_shot(ranks: int) -> Program:
    """Every rank sends its input to all and reduces all inputs itself."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own = Chunks(Buffer.INPUT, 0)
        reduce = Reduce(_in_rank_order(rank, ranks, own), (Chunks(Buffer.OUTPUT, 0),))
        return ((Send(own, others(rank, ranks)), reduce),) if ranks > 1 else ((reduce,),)

    return Program(
        "direct_one_shot",
        Collective.ALL_REDUCE,
        ranks,
        chunks=1,
        sends=1,
        lanes=lanes,
        copies=ranks > 1,
        reduces_at_once=True,
        period=1,
    )


def all_reduce_two_shot(ranks: int) -> Program:
    """Rank c reduces chunk c for all ranks, then sends the result to all.

    One lane sends the chunks in the order of ranks, so that rank 0 can reduce first; the other
    reduces and exchanges results. Thus one slot in each lane is enough. For up to four ranks, a
    single lane does both, which is a little faster and needs three slots, which always exist.
    """
    if ranks == 1:
        return all_reduce_one_shot(1)
    single = ranks <= SLOTS + 1

    def lanes(rank: int) -> tuple[Lane, ...]:
        operations = (
            *_reduced_for_all(rank, ranks),
            *_results(rank, ranks, lane=0 if single else 1),
        )
        if single:
            peers = others(rank, ranks)
            sends = (Send(Chunks(Buffer.INPUT, peer), (peer,)) for peer in peers)
            return ((*sends, *operations),)
        return (_hand_out(rank, ranks), operations)

    return Program(
        "direct_two_shot",
        Collective.ALL_REDUCE,
        ranks,
        chunks=ranks,
        sends=ranks if single else ranks - 1,
        lanes=lanes,
        reduces_at_once=True,
    )


def all_reduce_two_phase(ranks: int) -> Program:
    """The same with a lane for each step: chunks are sent out, reduced, and results fetched.

    Each step runs ahead of the next one. Data that is read in place has then left its writer's
    cache, and reading from there would be slower than from the cache that cores share.
    """
    if ranks == 1:
        return all_reduce_one_shot(1)
    return Program(
        "direct_two_phase",
        Collective.ALL_REDUCE,
        ranks,
        chunks=ranks,
        sends=ranks - 1,
        lanes=lambda rank: (
            _hand_out(rank, ranks),
            _reduced_for_all(rank, ranks),
            _results(rank, ranks, lane=1),
        ),
        reduces_at_once=True,
    )


def _reduced_for_all(rank: int, ranks: int) -> Lane:
    """Reduce this rank's chunk from all ranks, and send the result to the others."""
    result = Chunks(Buffer.OUTPUT, rank)
    operands = _in_rank_order(rank, ranks, Chunks(Buffer.INPUT, rank))
    return (Reduce(operands, (result,)), Send(result, others(rank, ranks)))


def _results(rank: int, ranks: int, lane: int) -> Lane:
    return tuple(
        receive(peer, Chunks(Buffer.OUTPUT, peer), lane=lane) for peer in others(rank, ranks)
    )


def reduce(ranks: int, root: int) -> Program:
    """All send to the root, which reduces in rank order."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own = Chunks(Buffer.INPUT, 0)
        if rank != root:
            return ((Send(own, (root,)),),)
        operands = _in_rank_order(rank, ranks, own)
        return ((Reduce(operands, (Chunks(Buffer.OUTPUT, 0),)),),)

    return Program(
        "direct",
        Collective.REDUCE,
        ranks,
        chunks=1,
        sends=1,
        lanes=lanes,
        root=root,
        reduces_at_once=True,
    )


def reduce_scatter(ranks: int) -> Program:
    """Rank b gets block b of all, and reduces them in rank order."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        operands = _in_rank_order(rank, ranks, Chunks(Buffer.INPUT, rank))
        reduction = Reduce(operands, (Chunks(Buffer.OUTPUT, 0),))
        return (_hand_out(rank, ranks), (reduction,)) if ranks > 1 else ((reduction,),)

    return Program(
        "direct",
        Collective.REDUCE_SCATTER,
        ranks,
        chunks=1,
        sends=max(ranks - 1, 1),
        lanes=lanes,
        reduces_at_once=True,
    )


def broadcast(ranks: int, root: int) -> Program:
    """The root sends its input to all."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own, result = Chunks(Buffer.INPUT, 0), Chunks(Buffer.OUTPUT, 0)
        if rank != root:
            return ((receive(root, result),),)
        keep = copy(own, result)
        return ((Send(own, others(root, ranks)), keep),) if ranks > 1 else ((keep,),)

    return Program("direct", Collective.BROADCAST, ranks, chunks=1, sends=1, lanes=lanes, root=root)


def all_gather(ranks: int) -> Program:
    """Every rank sends its input to all."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own, peers = Chunks(Buffer.INPUT, 0), others(rank, ranks)
        send = (Send(own, peers),) if peers else ()
        keep = copy(own, Chunks(Buffer.OUTPUT, rank))
        return ((*send, keep, *(receive(peer, Chunks(Buffer.OUTPUT, peer)) for peer in peers)),)

    return Program("direct", Collective.ALL_GATHER, ranks, chunks=1, sends=1, lanes=lanes, period=1)


def gather(ranks: int, root: int) -> Program:
    """All send to the root."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        own = Chunks(Buffer.INPUT, 0)
        if rank != root:
            return ((Send(own, (root,)),),)
        peers = others(root, ranks)
        keep = copy(own, Chunks(Buffer.OUTPUT, root))
        return ((keep, *(receive(peer, Chunks(Buffer.OUTPUT, peer)) for peer in peers)),)

    return Program("direct", Collective.GATHER, ranks, chunks=1, sends=1, lanes=lanes, root=root)


def scatter(ranks: int, root: int) -> Program:
    """The root sends each rank its block."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        result = Chunks(Buffer.OUTPUT, 0)
        if rank != root:
            return ((receive(root, result),),)
        sends = (Send(Chunks(Buffer.INPUT, peer), (peer,)) for peer in others(root, ranks))
        return ((*sends, copy(Chunks(Buffer.INPUT, root), result)),)

    sends = max(ranks - 1, 1)
    return Program(
        "direct", Collective.SCATTER, ranks, chunks=1, sends=sends, lanes=lanes, root=root
    )


def all_to_all(ranks: int) -> Program:
    """Every rank sends each other rank its block; one lane sends while the other receives."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        keep = copy(Chunks(Buffer.INPUT, rank), Chunks(Buffer.OUTPUT, rank))
        if ranks == 1:
            return ((keep,),)
        sends = (Send(Chunks(Buffer.INPUT, peer), (peer,)) for peer in others(rank, ranks))
        senders = reversed(others(rank, ranks))  # in the order in which their messages arrive
        takes = (receive(peer, Chunks(Buffer.OUTPUT, peer)) for peer in senders)
        return (tuple(sends), (keep, *takes))

    sends = max(ranks - 1, 1)
    return Program(
        "direct", Collective.ALL_TO_ALL, ranks, chunks=1, sends=sends, lanes=lanes, period=1
    )


def barrier(ranks: int) -> Program:
    """Every rank signals its arrival to all, and waits for all."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        peers = others(rank, ranks)
        if not peers:
            return ((),)
        arrived = Reduce(tuple(Incoming(peer) for peer in peers), ())
        return ((Send(Chunks(Buffer.INPUT, 0), peers), arrived),)

    return Program("direct", Collective.BARRIER, ranks, chunks=1, sends=1, lanes=lanes, period=1)


def send() -> Program:
    """Rank 0 of a pair sends to rank 1."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        if rank == 0:
            return ((Send(Chunks(Buffer.INPUT, 0), (1,)),),)
        return ((receive(0, Chunks(Buffer.OUTPUT, 0)),),)

    return Program("direct", Collective.SEND, 2, chunks=1, sends=1, lanes=lanes)
