"""What is told when workers have gone on after a loss, or with newcomers: who, and how fast."""

from __future__ import annotations

import time

from rallypoint.base.rank_names import name_ranks
from rallypoint.launch.agent.crew import Crew
from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.worker_group import WorkerGroup
from rallypoint.rendezvous.job.reports import Start


class Recovery:
    """The way from one round to the next, in which workers of this node go on.

    Args:
        over: the workers of the round that is over.
        elsewhere: why it ended, if that was not on this node.
        now: when the next one began (time.monotonic).
    """

    def __init__(self, over: WorkerGroup, elsewhere: str, start: Start, now: float) -> None:
        self._start, self._began, self._elsewhere = start, now, elsewhere
        self._failures = over.failures()
        self._pids = {failure.exit.rank: failure.exit.pid for failure in self._failures}
        noticed = [failure.time_s for failure in self._failures]
        self._since_loss_s = max(0.0, time.time() - min(noticed)) if noticed else 0.0

    def told(self, state: NodeState, crew: Crew, now: float) -> tuple[str, dict[str, object]]:
        """All workers of this node are in the round: a line, and an event for programs."""
        formed_s = now - self._began
        whole_s = self._since_loss_s + formed_s
        size = self._start.seat.world_size
        ranks = sorted(crew.by_rank)
        event = {
            "ranks": ranks,
            "world_size": size,
            "lost": sorted(self._pids),
            "because": self._start.because,
            "agree_s": round(self._since_loss_s, 4),
            "form_s": round(formed_s, 4),
            "restarts_allowed": self._start.may_replace,
        }
        here = f"{name_ranks(ranks)} of {size}" if ranks else f"{size} ranks elsewhere"
        if not self._start.is_urgent:
            return f"{self._start.because}: the job goes on with {size} ranks", event
        lost = "; ".join(
            f"rank {failure.exit.rank} (pid {failure.exit.pid}) {failure.what}"
            for failure in self._failures[:4]
        )
        what = lost or self._elsewhere or self._start.because
        return f"{what}; {here} go on after {whole_s * 1e3:.0f} ms", event
