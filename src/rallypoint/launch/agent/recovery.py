"""What is told when workers have gone on after a loss, or with newcomers: who, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rallypoint.base.durations import brief
from rallypoint.base.rank_names import name_ranks
from rallypoint.launch.worker_group import WorkerGroup
from rallypoint.rendezvous.job.reports import Start

_MOST_LOST = 4  # in a line


class Recovery:
    """The way from one round to the next, in which workers of this node go on.

        a worker is lost -> known here -> the next round begins -> its group has formed -> all have
                  detect_s        agree_s              form_s                sync_s   the state

    Args:
        over: the workers of the round that is over.
        elsewhere: why it ended, if that was not on this node.
        known_at: when this node knew of it (time.monotonic).
        now: when the next one began.
        before: the recovery on the way of which there was another loss.
    """

    def __init__(
        self,
        over: WorkerGroup,
        elsewhere: str,
        start: Start,
        *,
        known_at: float | None,
        now: float,
        before: Recovery | None,
    ) -> None:
        self._start, self._began, self._elsewhere = start, now, elsewhere
        self._known = now if known_at is None else known_at
        self._failures = over.failures()
        self._is_urgent = start.is_urgent
        self._formed: float | None = None
        # The times of losses are the kernel's; all others are of the monotonic clock.
        self._clock_s = time.time() - time.monotonic()
        if before is not None:
            self._failures = [*before._failures, *self._failures]
            causes = filter(None, (before._elsewhere, elsewhere))
            self._elsewhere = "; ".join(dict.fromkeys(causes))
            self._known = min(self._known, before._known)
            self._is_urgent = self._is_urgent or before._is_urgent

    def formed(self, now: float) -> None:
        """All workers of this node are in the round's group."""
        self._formed = now if self._formed is None else self._formed

    def times(self, now: float) -> dict[str, float | None]:
        """How long each part has taken, if all have the state now; null: nobody was lost here."""
        formed = now if self._formed is None else self._formed
        lost = [failure.noticed_s - self._clock_s for failure in self._failures]
        return {
            "detect_s": round(max(0.0, self._known - min(lost)), 4) if lost else None,
            "agree_s": round(self._began - self._known, 4),
            "form_s": round(formed - self._began, 4),
            "sync_s": round(now - formed, 4),
        }

    def lost_s(self, now: float) -> float:
        """How long the ranks here did not train: if nobody was lost, while newcomers got the state.

        Those who wait for newcomers do so at an update, and their agent cannot know since when.
        """
        times = self.times(now)
        return (
            sum(each or 0.0 for each in times.values())
            if self._is_urgent
            else times["sync_s"] or 0.0
        )

    def told(self, ranks: Iterable[int], now: float) -> tuple[str, dict[str, object]]:
        """All workers of this node, `ranks`, have the state: a line, and an event."""
        size, here = self._start.seat.world_size, sorted(ranks)
        event: dict[str, object] = {
            "ranks": here,
            "world_size": size,
            "lost_pids": [failure.pid for failure in self._failures],
            "because": self._start.because,
            **self.times(now),
        }
        if not self._failures and not self._is_urgent:
            return f"{self._start.because}: the job goes on with {size} ranks", event
        lost = [
            f"rank {failure.rank} (pid {failure.pid}) {failure.what}"
            for failure in self._failures[:_MOST_LOST]
        ]
        more = len(self._failures) - len(lost)
        told = "; ".join(lost) + f"; and {more} more" * bool(more)
        what = told or self._elsewhere or self._start.because
        if not here:
            return f"{what}; {size} ranks on other nodes go on", event
        goes = "goes" if len(here) == 1 else "go"
        whole = f"{self.lost_s(now) * 1e3:.0f} ms"
        return f"{what}; {name_ranks(here)} of {size} {goes} on after {whole}", event


class Recoveries:
    """All of a job, on one node."""

    def __init__(self) -> None:
        self._count = self._begun_again = 0
        self._lost_s = 0.0

    def add(self, lost_s: float, *, begins_again: bool) -> None:
        """Workers have gone on; `begins_again`: with a step that they had begun before."""
        self._count += 1
        self._lost_s += lost_s
        self._begun_again += begins_again

    def summary(self, uptime_s: float) -> tuple[str, dict[str, object]] | None:
        """A line, and an event; None: there was none."""
        if not self._count:
            return None
        event: dict[str, object] = {
            "went_on": self._count,
            "lost_s": round(self._lost_s, 3),
            "uptime_s": round(uptime_s, 3),
            "begun_again": self._begun_again,
        }
        times = "once" if self._count == 1 else f"{self._count} times"
        steps = "1 step" if self._begun_again == 1 else f"{self._begun_again} steps"
        text = (
            f"went on in place {times}; {brief(self._lost_s)} of {brief(uptime_s)} lost to it;"
            f" {steps} begun again"
        )
        return text, event
