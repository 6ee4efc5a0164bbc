"""What is told when workers have gone on after a loss, or with newcomers: who, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rallypoint.base.rank_names import name_ranks
from rallypoint.launch.worker_group import WorkerGroup
from rallypoint.rendezvous.job.reports import Start

_MOST_LOST = 4  # in a line


class Recovery:
    """The way from one round to the next, in which workers of this node go on.

    Args:
        over: the workers of the round that is over.
        elsewhere: why it ended, if that was not on this node.
        now: when the next one began (time.monotonic).
        before: the recovery on the way of which there was another loss.
    """

    def __init__(
        self, over: WorkerGroup, elsewhere: str, start: Start, now: float, before: Recovery | None
    ) -> None:
        self._start, self._began, self._elsewhere = start, now, elsewhere
        self._failures = over.failures()
        self._lost_s = [failure.time_s for failure in self._failures]
        self._agreed_s = time.time()
        if before is not None:
            self._failures = [*before._failures, *self._failures]
            self._lost_s += before._lost_s
            self._elsewhere = before._elsewhere or elsewhere

    def told(self, ranks: Iterable[int], now: float) -> tuple[str, dict[str, object]]:
        """All workers of this node, `ranks`, are in the round: a line, and an event."""
        formed_s = now - self._began
        agreed_s = max(0.0, self._agreed_s - min(self._lost_s)) if self._lost_s else 0.0
        size, here = self._start.seat.world_size, sorted(ranks)
        event = {
            "ranks": here,
            "world_size": size,
            "lost_pids": [failure.exit.pid for failure in self._failures],
            "because": self._start.because,
            "agree_s": round(agreed_s, 4),
            "form_s": round(formed_s, 4),
        }
        if not self._failures and not self._start.is_urgent:
            return f"{self._start.because}: the job goes on with {size} ranks", event
        lost = [
            f"rank {failure.exit.rank} (pid {failure.exit.pid}) {failure.what}"
            for failure in self._failures[:_MOST_LOST]
        ]
        more = len(self._failures) - len(lost)
        told = "; ".join(lost) + f"; and {more} more" * bool(more)
        whole = f"{(agreed_s + formed_s) * 1e3:.0f} ms"
        if not here:
            return f"{told}; {size} ranks on other nodes go on", event
        goes = "goes" if len(here) == 1 else "go"
        what = told or self._elsewhere or self._start.because
        return f"{what}; {name_ranks(here)} of {size} {goes} on after {whole}", event
