"""Simulated time: a queue of events, and clocks that differ in offset and speed.

Nothing here is random except what the caller passes in, so a seed always produces the same story.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable


class SimLoop:
    """Events in the order of their time; simultaneous ones in the order in which they were
    added.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []

    def at(self, time: float, what: Callable[[], object]) -> None:
        """Call `what` at that time."""
        self.count += 1
        heapq.heappush(self._queue, (max(time, self.now), self.count, what))

    def after(self, delay_s: float, what: Callable[[], object]) -> None:
        """Call `what` after that delay."""
        self.at(self.now + delay_s, what)

    def run(self, until: float) -> None:
        """Let time pass up to `until`."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, what = heapq.heappop(queue)
            what()
        self.now = until


class SimClock:
    """One machine's clock."""

    def __init__(self, loop: SimLoop, *, offset_s: float = 0.0, speed: float = 1.0) -> None:
        self._loop = loop
        self._offset_s = offset_s
        self._speed = speed

    def now(self) -> float:
        """The time that it shows."""
        return self._offset_s + self._loop.now * self._speed

    def when(self, shown: float) -> float:
        """The true time at which it shows a given time."""
        return (shown - self._offset_s) / self._speed
