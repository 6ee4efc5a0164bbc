"""The same times as walk.py, many operations at once: for large numbers of ranks and pieces.

The operations of a piece are sorted into waves: each is in a later wave than those it waits for. A
wave takes a few array operations, whatever the number of ranks. Pieces follow one another. Times
consist only of sums and maxima. So once every operation ends later than in the previous piece by
the same time, over as many pieces as anything depends on, the pattern repeats, and the rest is a
multiplication.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from rallypoint.schedule.cost.links import Links
from rallypoint.schedule.cost.simulation.prices import Floats, Ints, Load, Pieces
from rallypoint.schedule.execution import Trace, execute
from rallypoint.schedule.program import Program, Send


@contextmanager
def without_collector() -> Iterator[None]:
    """Pause Python's search for cycles, which would take half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Conditions:
    """Random noise and disturbances; none by default.

    Attributes:
        noise: operations take longer at random, by this share on average (exponential).
        late_us: rank -> how much later it starts.
        slow: rank -> the factor by which its operations take longer.
        failed: pairs of ranks whose link delivers each message only after `retry_us`.
        seed: the seed of the random numbers.
    """

    noise: float = 0.0
    late_us: tuple[tuple[int, float], ...] = ()
    slow: tuple[tuple[int, float], ...] = ()
    failed: tuple[tuple[int, int], ...] = ()
    retry_us: float = 1e6
    seed: int = 0

    @property
    def is_disturbed(self) -> bool:
        """Whether anything except the seed is set."""
        return bool(self.noise or self.late_us or self.slow or self.failed)

    def with_seed(self, seed: int) -> Conditions:
        """The same conditions with other random numbers."""
        return replace(self, seed=seed)


CALM = Conditions()


class Graph:
    """The operations of one piece of a program on some links, ready to be timed."""

    def __init__(self, program: Program, links: Links) -> None:
        self.program, self.links = program, links
        with without_collector():
            self._trace = execute(program, slots=links.slots, pieces=1)
            self._flatten(self._trace)
            self._waves = self._sort(self._trace)
        self._price()

    def repriced(self, links: Links) -> Graph:
        """The same program on other links."""
        if links.slots != self.links.slots:
            return Graph(self.program, links)
        other = copy(self)
        other.links = links
        other._price()
        return other

    @property
    def load(self) -> Load:
        """What the program asks of ranks and links."""
        busy = np.zeros((self.program.ranks, 2))
        np.add.at(busy, self._rank, self._busy)
        pairs = np.stack((self._rank[self._sender], self._rank[self._taker]), axis=1)
        links, which = np.unique(pairs, axis=0, return_inverse=True)
        chunks = np.zeros(len(links), np.int64)
        np.add.at(chunks, which.ravel(), self._chunks[self._sender])
        return Load(busy, links, chunks)

    def _flatten(self, trace: Trace) -> None:
        """Events and messages as arrays."""
        count = len(trace.events)
        self._count, self._lanes = count, len(trace.lanes)
        lane_ranks = [rank for rank, _ in trace.lanes]
        self._lane_rank = np.array(lane_ranks, np.int64)
        self._rank = np.array([lane_ranks[event.lane] for event in trace.events], np.int64)
        self._chunks = np.zeros(count, np.int64)  # chunks in a message
        # Where the time at which a lane is free comes from: an event, or (from `count` on) a lane.
        self._after = np.empty(count, np.int64)
        last = [count + lane for lane in range(self._lanes)]
        takes: list[tuple[int, int]] = []
        letters: dict[tuple[int, int], int] = {}  # (event of the send, receiver) -> its number
        messages: list[int] = []  # by take
        self._reads = np.zeros(count, np.int64)  # chunks of all operands of a reduction
        for number, event in enumerate(trace.events):
            self._after[number], last[event.lane] = last[event.lane], number
            operation = event.operation
            if isinstance(operation, Send):
                self._chunks[number] = operation.source.count
                for to in operation.to:
                    letters[number, to] = len(letters)
            else:
                stored = sum(target.count for target in operation.targets[:1])
                self._reads[number] = stored * len(operation.operands)
                rank = lane_ranks[event.lane]
                takes += [(number, each) for each in event.takes]
                messages += [letters[each, rank] for each in event.takes]
        self._last = np.array(last, np.int64)
        self._taker, self._sender = np.array(takes, np.int64).reshape(-1, 2).T
        self._message = np.array(messages, np.int64)
        self._letters = np.array(list(letters), np.int64).reshape(-1, 2)

    def _price(self) -> None:
        """Compute the price of every operation and message on the links: prices.py for all at
        once.
        """
        links = self.links
        bounds = [level.ranks for level in links.levels[:-1]]
        latency, overhead, us_per_byte = np.array(
            [(each.latency_us, each.overhead_us, 1 / each.gb_per_s / 1e3) for each in links.levels]
        ).T
        event, receiver = self._letters.T
        level = _levels(self._rank[event], receiver, bounds)
        fixed, per_byte = overhead[level], us_per_byte[level] * self._chunks[event]
        first = np.flatnonzero(np.diff(event, prepend=-1))  # where another send begins
        position = np.arange(len(event)) - np.repeat(first, np.diff(first, append=len(event)))
        for behind in range(1, int(position.max(initial=0)) + 1):
            here = np.flatnonzero(position == behind)
            if links.multicast:  # the farthest receiver counts, or the first of several
                nearer = here[latency[level[here]] <= latency[level[here - 1]]]
                level[nearer] = level[nearer - 1]
            else:
                fixed[here] += fixed[here - 1]
                per_byte[here] += per_byte[here - 1]
        self._busy = np.zeros((self._count, 2))
        last = np.append(first[1:], len(event)) - 1 if len(event) else first
        if links.multicast:
            own = _levels(self._rank[event], receiver, bounds)
            far = np.repeat(level[last], np.diff(first, append=len(event)))
            fixed, per_byte = overhead[far], us_per_byte[far] * self._chunks[event]
            level = own
        self._busy[event[last]] = np.stack((fixed[last], per_byte[last]), axis=1)
        arrivals = np.stack((fixed + latency[level], per_byte), axis=1)
        is_reduce = self._chunks == 0
        self._busy[is_reduce, 1] = self._reads[is_reduce] / links.reduce_gb_per_s / 1e3
        taken = overhead[_levels(self._rank[self._taker], self._rank[self._sender], bounds)]
        np.add.at(self._busy[:, 0], self._taker, taken)
        self._delay = arrivals[self._message]

    def _sort(self, trace: Trace) -> list[_Wave]:
        """Put events into waves, and renumber them so that those of a wave are consecutive."""
        sends: list[list[int]] = [[] for _ in trace.lanes]
        for number, event in enumerate(trace.events):
            if isinstance(event.operation, Send):
                sends[event.lane].append(number)
        holders = np.full(self._count, -1)  # the send whose message must be received first,
        back = np.zeros(self._count, np.int64)  # and how many pieces earlier
        for row in sends:
            for ordinal, number in enumerate(row):
                pieces, holder = divmod(ordinal - self.links.slots, len(row))
                holders[number], back[number] = row[holder], -pieces
        depth = np.zeros(self._count, np.int64)
        hops = [0] * self._count
        for number, event in enumerate(trace.events):
            after = self._after[number]
            deepest, hop = (depth[after] + 1, hops[after]) if after < self._count else (0, 0)
            for sending in event.takes:
                deepest = max(deepest, depth[sending] + 1)
                hop = max(hop, hops[sending] + 1)
            hops[number] = hop
            if holders[number] >= 0 and back[number] == 0:
                for taker in trace.takers[holders[number]]:
                    deepest = max(deepest, depth[taker] + 1)
            depth[number] = deepest
        self.steps = max(hops, default=0)  # the longest chain of messages
        self._back = int(back.max(initial=0))
        order = np.argsort(depth, kind="stable")
        bounds = np.searchsorted(depth[order], np.arange(depth.max(initial=-1) + 2))
        take_order = np.lexsort((self._taker, depth[self._taker]))
        take_bounds = np.searchsorted(depth[self._taker][take_order], np.arange(len(bounds)))
        self._renumber(order, take_order)
        holders, back = holders[order], back[order]
        new = np.argsort(order)
        holders[holders >= 0] = new[holders[holders >= 0]]
        waves = []
        for wave in range(len(bounds) - 1):
            events = slice(int(bounds[wave]), int(bounds[wave + 1]))
            takes = slice(int(take_bounds[wave]), int(take_bounds[wave + 1]))
            takers, first = np.unique(self._taker[takes], return_index=True)
            held = []
            for pieces in range(self._back + 1):
                waits = (holders[events] >= 0) & (back[events] == pieces)
                waiting = np.flatnonzero(waits) + events.start
                held.append((waiting, holders[waiting]))
            waves.append(_Wave(events, takes, takers, first, held))
        return waves

    def _renumber(self, order: Ints, take_order: Ints) -> None:
        new = np.append(np.argsort(order), np.arange(self._count, self._count + self._lanes))
        self._rank, self._chunks, self._reads = (
            each[order] for each in (self._rank, self._chunks, self._reads)
        )
        self._after, self._last = new[self._after[order]], new[self._last]
        self._taker, self._sender = new[self._taker[take_order]], new[self._sender[take_order]]
        self._message = self._message[take_order]
        self._letters[:, 0] = new[self._letters[:, 0]]

    def run(self, pieces: Pieces, *, conditions: Conditions = CALM) -> Floats:
        """The time at which each rank ends, in microseconds; inf where it never does."""
        chance = np.random.default_rng(conditions.seed)
        begins = np.zeros(self.program.ranks)
        for rank, late_us in conditions.late_us:
            begins[rank] += late_us
        if self._count == 0:
            return begins
        busy, delay = self._disturbed(pieces.chunk_bytes, conditions)
        ends = np.concatenate((np.zeros(self._count), begins[self._lane_rank]))
        start = np.empty(self._count)
        history: deque[Floats] = deque(maxlen=self._back + 1)
        growths: list[float] = []
        for piece in range(pieces.number):
            noisy, late = busy, delay
            if conditions.noise:
                noisy = busy * (1 + chance.exponential(conditions.noise, busy.shape))
                late = delay * (1 + chance.exponential(conditions.noise, delay.shape))
            before = ends[: self._count].copy()
            history.append(np.zeros(self._count))
            self._run_piece(ends, start, noisy, late, history)
            ends[self._count :] = ends[self._last]
            growth = ends[: self._count] - before
            is_even = np.ptp(growth) <= 1e-9 * max(growth.max(), 1e-9)
            growths.append(float(growth[0]) if is_even and not conditions.noise else math.nan)
            rest = _carried_on(growths[1:], self._back + 1, pieces.number - 1 - piece)
            if rest is not None:
                ends[self._count :] += rest
                break
        result: Floats = begins
        np.maximum.at(result, self._lane_rank, ends[self._count :])
        return result

    def _disturbed(self, chunk_bytes: float, conditions: Conditions) -> tuple[Floats, Floats]:
        busy = self._busy[:, 0] + self._busy[:, 1] * chunk_bytes
        delay = self._delay[:, 0] + self._delay[:, 1] * chunk_bytes
        for rank, times in conditions.slow:
            busy[self._rank == rank] *= times
        if conditions.failed:
            one, other = self._rank[self._sender], self._rank[self._taker]
            for pair in conditions.failed:
                lost = ((one == pair[0]) & (other == pair[1])) | (
                    (one == pair[1]) & (other == pair[0])
                )
                delay[lost] += conditions.retry_us
        return busy, delay

    def _run_piece(
        self, ends: Floats, start: Floats, busy: Floats, delay: Floats, history: deque[Floats]
    ) -> None:
        """One piece, in place: `ends` of events and lanes, `start` of events."""
        taken = history[-1]
        for wave in self._waves:
            events, takes = wave.events, wave.takes
            senders = self._sender[takes]
            start[events] = ends[self._after[events]]
            if len(senders):
                latest = np.maximum.reduceat(start[senders] + delay[takes], wave.first)
                start[wave.takers] = np.maximum(start[wave.takers], latest)
            for back, (waiting, holders) in enumerate(wave.held):
                if len(waiting) and back < len(history):
                    free = history[-1 - back][holders]
                    start[waiting] = np.maximum(start[waiting], free)
            np.add(start[events], busy[events], out=ends[events])
            if len(senders):
                np.maximum.at(taken, senders, ends[self._taker[takes]])


def _levels(one: Ints, other: Ints, bounds: list[float]) -> Ints:
    """For each pair of ranks, the level of their link (Links.between)."""
    level = np.full(len(one), len(bounds))
    for number in reversed(range(len(bounds))):
        level[one // bounds[number] == other // bounds[number]] = number
    return level


def _carried_on(growths: list[float], reach: int, count: int) -> float | None:
    """The growth of `count` more pieces, if the last ones repeat what came before.

    If everything grew equally for `reach` pieces, a piece depends on nothing but these growths.
    """
    for cycle in range(1, reach + 1):
        if len(growths) < reach + cycle:
            return None
        last, before = growths[-reach:], growths[-reach - cycle : -cycle]
        if np.allclose(last, before, rtol=1e-9, atol=0):  # never for nan
            rounds, left = divmod(count, cycle)
            return rounds * sum(growths[-cycle:]) + sum(growths[-cycle:][:left])
    return None


@dataclass(frozen=True, slots=True)
class _Wave:
    """Events that do not wait for one another.

    Attributes:
        events: their numbers.
        takes: the messages that they receive, in the order of the receivers.
        takers: the events among them that receive messages; the first message of each is at
            `first`.
        held: for 0, 1, ... pieces back: the sends that wait for a slot, and the sends that hold it.
    """

    events: slice
    takes: slice
    takers: Ints
    first: Ints
    held: list[tuple[Ints, Ints]]
