"""The cost of each operation of a program on given links: a fixed part and a part per byte.

`bytes` is the size of one chunk in one piece; all chunks are assumed to be equally long.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rallypoint.schedule.cost.links import Level, Links
from rallypoint.schedule.program import Operation, Program, Reduce, Send, incoming, transformed


class Price(NamedTuple):
    """A price in microseconds: a fixed part, and a part for each byte of a chunk."""

    fixed: float
    per_byte: float

    def at(self, chunk_bytes: float) -> float:
        """The price for chunks of a given length."""
        return self.fixed + self.per_byte * chunk_bytes


class Pieces(NamedTuple):
    """How a call is split: how many times the program runs, and on chunks of what length."""

    number: int
    chunk_bytes: float


def cut(program: Program, block_bytes: float, links: Links) -> Pieces:
    """Split blocks into chunks, and chunks into pieces so that no message is too large."""
    chunk = block_bytes / program.chunks
    count = max(1, math.ceil(chunk * program.span / links.block_bytes - 1e-9))
    return Pieces(count, chunk / count)


def slowed(pieces: Pieces, block_bytes: float, links: Links) -> Pieces:
    """The same pieces, with chunks lengthened by the factor by which bytes cost more in a call of
    this size.
    """
    return pieces._replace(chunk_bytes=pieces.chunk_bytes * links.slowdown_at(block_bytes))


def send_price(links: Links, rank: int, send: Send) -> tuple[Price, list[Price]]:
    """How long a send keeps its lane busy, and when, counted from its start, each receiver has
    it.
    """
    fixed, per_byte = 0.0, 0.0
    arrivals = []
    levels = [links.between(rank, receiver) for receiver in send.to]
    if links.multicast:
        far = max(levels, key=lambda level: level.latency_us)
        fixed, per_byte = far.overhead_us, send.source.count * _us_per_byte(far)
        arrivals = [Price(fixed + level.latency_us, per_byte) for level in levels]
        return Price(fixed, per_byte), arrivals
    for level in levels:
        fixed += level.overhead_us
        per_byte += send.source.count * _us_per_byte(level)
        arrivals.append(Price(fixed + level.latency_us, per_byte))
    return Price(fixed, per_byte), arrivals


def reduce_price(links: Links, rank: int, reduce: Reduce) -> Price:
    """How long receiving, combining and storing takes."""
    fixed = sum(links.between(rank, each.peer).overhead_us for each in incoming(reduce))
    chunks = sum(target.count for target in reduce.targets[:1]) * len(reduce.operands)
    return Price(fixed, chunks / links.reduce_gb_per_s / 1e3)


def _us_per_byte(level: Level) -> float:
    return 1 / level.gb_per_s / 1e3


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one piece.

    Attributes:
        busy: for each rank, how long its lanes work, in microseconds: a fixed part, and a part per
            byte.
        links: the pairs of ranks that communicate, as (from, to).
        chunks: for each of these, the number of chunks sent.
    """

    busy: Floats
    links: Ints
    chunks: Ints

    @property
    def busiest_link(self) -> int:
        """The largest number of chunks between two ranks."""
        return int(self.chunks.max(initial=0))

    @staticmethod
    def is_shared(links: Links) -> bool:
        """Whether any shared resource of these links can be a bound."""
        return links.shares_core or links.cores > 0 or math.isfinite(links.nic_gb_per_s)

    def bound_us(self, links: Links, pieces: Pieces) -> tuple[str, float]:
        """The resource that is busy for the longest time, and for how long."""
        size, count = pieces.chunk_bytes, pieces.number
        work = self.busy[:, 0] + self.busy[:, 1] * size
        bounds = [("", 0.0)]
        if links.shares_core:
            bounds.append(("core", count * float(work.max(initial=0.0))))
        per_node = next((int(each.ranks) for each in links.levels if each.name == "node"), 0)
        if links.cores and per_node:
            nodes = np.add.reduceat(work, np.arange(0, len(work), per_node))
            bounds.append(("cores of a node", count * float(nodes.max()) / links.cores))
        if math.isfinite(links.nic_gb_per_s) and per_node:
            one, other = self.links.T // per_node
            out = np.zeros(int(one.max(initial=0)) + 1)
            np.add.at(out, one[one != other], self.chunks[one != other])
            us_per_byte = 1 / links.nic_gb_per_s / 1e3
            bounds.append(("network port", count * float(out.max()) * size * us_per_byte))
        return max(bounds, key=lambda each: each[1])


# For each rank of a period: an operation, and how often the rank performs one like it.
Census: TypeAlias = list[list[tuple[Operation, int]]]


def census(program: Program) -> Census:
    """The operations of the ranks of a period, on any links; other ranks repeat them."""
    ranks: Census = []
    for rank in range(program.period or program.ranks):
        alike: dict[tuple[object, ...], list[Operation]] = {}
        for lane in program.lanes(rank):
            for operation in lane:
                alike.setdefault(_price_key(operation), []).append(operation)
        ranks.append([(operations[0], len(operations)) for operations in alike.values()])
    return ranks


def tally(counted: Census, links: Links, *, ranks: int, of: int) -> Load:
    """The load of the first `ranks` ranks, `of` so many."""
    busy = np.zeros((ranks, 2))
    chunks: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        like = rank % len(counted)
        for kind, count in counted[like]:
            operation = _moved(kind, rank - like, of)
            if isinstance(operation, Send):
                busy[rank] += np.multiply(send_price(links, rank, operation)[0], count)
                for to in operation.to:
                    chunks[rank, to] += operation.source.count * count
            else:
                busy[rank] += np.multiply(reduce_price(links, rank, operation), count)
    pairs = np.array(list(chunks), np.int64).reshape(-1, 2)
    return Load(busy, pairs, np.array(list(chunks.values()), np.int64))


def _moved(operation: Operation, by: int, ranks: int) -> Operation:
    """The same operation on a rank further on."""
    if by == 0:
        return operation
    return transformed(operation, peer=lambda peer: (peer + by) % ranks)


def _price_key(operation: Operation) -> tuple[object, ...]:
    """Operations of a rank with equal keys have the same price."""
    if isinstance(operation, Send):
        return operation.to, operation.source.count
    peers = tuple(each.peer for each in incoming(operation))
    return peers, len(operation.operands), sum(each.count for each in operation.targets[:1])
