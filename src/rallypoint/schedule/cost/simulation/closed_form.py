"""Formulas for the times of ring algorithms, tested against walk.py for n up to 1,024.

A chunk goes from rank to rank. Each hop is a send, the transfer, and a receive with or without
adding:

    all_reduce of n ranks    n - 1 hops with adding, n - 1 without       the slowest chunk counts
    node_ring                the same, there with and back without adding

The formula holds if no rank is busy when a chunk arrives, that is, if the shortest hop takes longer
than any rank works on a chunk. Otherwise queues build up, and no formula is used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rallypoint.schedule.cost.links import Links
from rallypoint.schedule.cost.simulation.prices import Pieces, reduce_price, send_price
from rallypoint.schedule.program import Buffer, Chunks, Collective, Incoming, Program, Reduce, Send

Floats = NDArray[np.float64]
_KNOWN = (
    ("ring", Collective.ALL_REDUCE),
    ("ring", Collective.REDUCE_SCATTER),
    ("node_ring", Collective.ALL_REDUCE),
)


class _Hops(NamedTuple):
    """For each rank, the time of the hop to the next rank, by part."""

    send: Floats
    way: Floats
    add: Floats  # receiving it and adding to it, at the next rank
    keep: Floats  # receiving it unchanged

    @property
    def with_adding(self) -> Floats:
        return self.send + self.way + self.add

    @property
    def without(self) -> Floats:
        return self.send + self.way + self.keep

    @property
    def has_no_queues(self) -> bool:
        """Whether no rank works on a chunk for longer than the next one takes to arrive."""
        work = np.maximum(np.roll(self.add, 1), np.roll(self.keep, 1)) + self.send
        return bool(work.max() <= min(self.with_adding.min(), self.without.min()) + 1e-12)


def time_us(program: Program, pieces: Pieces, links: Links) -> float | None:
    """The time at which the last rank ends, or None if there is no formula."""
    ranks = program.ranks
    if (program.name, program.collective) not in _KNOWN or ranks <= 2 or links.slots < 2:
        return None
    hops = _hops(ranks, pieces.chunk_bytes, links)
    is_uniform = all(np.ptp(part) == 0 for part in hops)
    if not hops.has_no_queues or (pieces.number > 1 and not (is_uniform and program.period == 1)):
        return None
    if program.name == "node_ring":
        nodes = program.chunks
        if nodes == 1 or program.period == 0:
            return None
        there, back = (_around(way, ranks - 1) for way in (hops.with_adding, hops.without))
        return float((there + back)[:: program.period].max())
    adding = _around(hops.with_adding, ranks - 1)
    if program.collective is Collective.ALL_REDUCE:
        adding += np.roll(_around(hops.without, ranks - 1), 1)
    return pieces.number * float(adding.max())


def _around(hops: Floats, count: int) -> Floats:
    """For each rank, the sum of the next `count` hops round the ring."""
    total = np.concatenate(([0.0], np.cumsum(np.concatenate((hops, hops)))))
    return total[count : count + len(hops)] - total[: len(hops)]


def _hops(ranks: int, chunk_bytes: float, links: Links) -> _Hops:
    """The hops, computed by level, because there are few different ones."""
    here = Chunks(Buffer.INPUT, 0)
    known: dict[str, tuple[float, float, float, float]] = {}
    rows = np.empty((ranks, 4))
    for rank in range(ranks):
        after = (rank + 1) % ranks
        level = links.between(rank, after).name
        if level not in known:
            busy, (arrival,) = send_price(links, rank, Send(here, (after,)))
            send = busy.at(chunk_bytes)
            incoming = Incoming(rank)
            add = reduce_price(links, after, Reduce((incoming, here), (here,)))
            keep = reduce_price(links, after, Reduce((incoming,), (here,)))
            way = arrival.at(chunk_bytes) - send
            known[level] = (send, way, add.at(chunk_bytes), keep.at(chunk_bytes))
        rows[rank] = known[level]
    return _Hops(*rows.T)
