"""The cost of each operation of a program on given links: a fixed part and a part per byte.

`bytes` is the size of one chunk in one piece; all chunks are assumed to be equally long.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from rallypoint.schedule.cost.links import Level, Links
from rallypoint.schedule.program import Incoming, Program, Reduce, Send


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
    peers = [operand.peer for operand in reduce.operands if isinstance(operand, Incoming)]
    fixed = sum(links.between(rank, peer).overhead_us for peer in peers)
    chunks = sum(target.count for target in reduce.targets[:1]) * len(reduce.operands)
    return Price(fixed, chunks / links.reduce_gb_per_s / 1e3)


def _us_per_byte(level: Level) -> float:
    return 1 / level.gb_per_s / 1e3
