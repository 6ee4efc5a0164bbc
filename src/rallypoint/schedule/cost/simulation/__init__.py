"""How long a program would take on given links: `Simulation(program, links).run(nbytes)`.

prices.py        what an operation costs, and the load: what is shared (a core, a network port) is
                 no queue but a bound: the whole takes at least as long as its busiest part is busy
walk.py          the definition, one operation at a time; ranks that do the same only once
wave.py          the same for all ranks at once; with noise and failures

For rings of more than a thousand ranks there is a formula, which tests compare with walk.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.schedule.cost.links import Level, Links
from rallypoint.schedule.cost.simulation.prices import (
    Census,
    Floats,
    Load,
    Pieces,
    census,
    cut,
    reduce_price,
    send_price,
    slowed,
    tally,
)
from rallypoint.schedule.cost.simulation.walk import walk
from rallypoint.schedule.cost.simulation.wave import CALM, Conditions, Graph, without_collector
from rallypoint.schedule.program import Buffer, Chunks, Collective, Incoming, Program, Reduce, Send

FORMULA_RANKS = 1024  # above this, a formula is used if there is one; tests compare up to here
MOST_OPERATIONS = 20_000_000
_HOPS = Links("hops", (Level("all", math.inf, latency_us=1.0),), slots=64)
_WITH_FORMULA = (
    ("ring", Collective.ALL_REDUCE),
    ("ring", Collective.REDUCE_SCATTER),
    ("node_ring", Collective.ALL_REDUCE),
)


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a simulation.

    Attributes:
        time_us: when the last rank ends; inf if some rank never does.
        pieces: the number of pieces in which each chunk is sent.
        steps: the longest chain of messages of one piece.
        busiest_link_bytes: the most bytes that any rank sends to another.
        bound: what determines the time: "path", or the shared resource that is always busy.
        method: "formula", "folded" or "all ranks".
    """

    time_us: float
    pieces: int
    steps: int
    busiest_link_bytes: float
    bound: str
    method: str


class Simulation:
    """A program on links, which can be timed for several sizes."""

    def __init__(self, program: Program, links: Links, twin: Simulation | None = None) -> None:
        self.program, self.links = program, links
        self._twin = twin  # a simulation of the same program on other links, to save work
        self._period = _period(program, links)
        self._graph: Graph | None = None
        with without_collector():
            self._rank_operations: int = (
                twin._rank_operations if twin else sum(map(len, program.lanes(program.root)))
            )
        operations = self._rank_operations * (self._period or program.ranks)
        if operations > MOST_OPERATIONS:
            raise InvalidArgumentError(
                f"{program.name} of {program.ranks} ranks has about {operations:.0e} "
                "operations, too many to simulate; take fewer ranks or another algorithm"
            )

    def run(self, nbytes: float, conditions: Conditions = CALM) -> SimulationResult:
        """Time a call of `nbytes` bytes: the size of a block, or for all_to_all of all blocks."""
        block = nbytes
        if self.program.collective is Collective.ALL_TO_ALL:
            block = nbytes / self.program.ranks
        pieces = cut(self.program, block, self.links)
        priced = slowed(pieces, block, self.links)
        path_us, method = self._path(priced, conditions)
        bound, busy_us = self.load.bound_us(self.links, priced)
        return SimulationResult(
            time_us=self.links.start_us + max(path_us, busy_us),
            pieces=pieces.number,
            steps=self.steps,
            busiest_link_bytes=self.load.busiest_link * pieces.number * pieces.chunk_bytes,
            bound=bound if busy_us > path_us else "path",
            method=method,
        )

    @cached_property
    def steps(self) -> int:
        """The longest chain of messages: the time if each message took 1 and everything else 0."""
        pieces = Pieces(1, 0.0)
        time_us = ring_time_us(self.program, pieces, _HOPS)
        if time_us is None and self._period:
            time_us = max(walk(self.program, pieces, _HOPS, period=self.program.period))
        return self._whole().steps if time_us is None else round(time_us)

    def _path(self, pieces: Pieces, conditions: Conditions) -> tuple[float, str]:
        if conditions == CALM:
            if self.program.ranks > FORMULA_RANKS:
                time_us = ring_time_us(self.program, pieces, self.links)
                if time_us is not None:
                    return time_us, "formula"
            if self._period:
                ends = walk(self.program, pieces, self.links, period=self._period)
                return max(ends), "folded"
        return float(self._whole().run(pieces, conditions=conditions).max()), "all ranks"

    def _whole(self) -> Graph:
        if self._graph is None:
            twin = self._twin._graph if self._twin else None
            self._graph = twin.repriced(self.links) if twin else Graph(self.program, self.links)
        return self._graph

    @cached_property
    def census(self) -> Census:
        """The operations of the ranks of a period."""
        if self._twin is not None:
            return self._twin.census
        with without_collector():
            return census(self.program)

    @cached_property
    def load(self) -> Load:
        """The load that the program puts on each rank and link."""
        if not self._period:
            return self._whole().load
        ranks = self._period if Load.is_shared(self.links) else self.program.period
        return tally(self.census, self.links, ranks=ranks, of=self.program.ranks)


def _period(program: Program, links: Links) -> int:
    """The distance at which ranks do the same on equal links; 0 if there is none."""
    if not program.period:
        return 0
    sizes = [int(level.ranks) for level in links.levels[:-1] if math.isfinite(level.ranks)]
    period = math.lcm(program.period, *sizes)
    return period if period <= program.ranks and program.ranks % period == 0 else 0


class _Hops(NamedTuple):
    """For each rank, the time of the hop to the next rank, by part."""

    send: Floats
    transfer: Floats
    add: Floats  # receiving it and adding to it, at the next rank
    keep: Floats  # receiving it unchanged

    @property
    def with_adding(self) -> Floats:
        return self.send + self.transfer + self.add

    @property
    def without(self) -> Floats:
        return self.send + self.transfer + self.keep

    @property
    def has_no_queues(self) -> bool:
        """Whether no rank works on a chunk for longer than the next one takes to arrive."""
        work = np.maximum(np.roll(self.add, 1), np.roll(self.keep, 1)) + self.send
        return bool(work.max() <= min(self.with_adding.min(), self.without.min()) + 1e-12)


def ring_time_us(program: Program, pieces: Pieces, links: Links) -> float | None:
    """The time at which the last rank ends, by a formula for rings; None if there is none.

    A chunk goes from rank to rank. Each hop is a send, the transfer, and a receive with or without
    adding:

        all_reduce of n ranks    n - 1 hops with adding, n - 1 without    the slowest chunk counts
        node_ring                the same, there with and back without adding

    The formula holds if no rank is busy when a chunk arrives, that is, if the shortest hop takes
    longer than any rank works on a chunk. Otherwise queues build up, and no formula is used.
    """
    ranks = program.ranks
    if (program.name, program.collective) not in _WITH_FORMULA or ranks <= 2 or links.slots < 2:
        return None
    hops = _hops(ranks, pieces.chunk_bytes, links)
    is_uniform = all(np.ptp(part) == 0 for part in hops)
    if not hops.has_no_queues or (pieces.number > 1 and not (is_uniform and program.period == 1)):
        return None
    if program.name == "node_ring":
        nodes = program.chunks
        if nodes == 1 or program.period == 0:
            return None
        there, back = (_around(each, ranks - 1) for each in (hops.with_adding, hops.without))
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
            transfer = arrival.at(chunk_bytes) - send
            known[level] = (send, transfer, add.at(chunk_bytes), keep.at(chunk_bytes))
        rows[rank] = known[level]
    return _Hops(*rows.T)
