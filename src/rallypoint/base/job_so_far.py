"""What has happened in a job so far, as the agent of one of its nodes saw it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from rallypoint.base.record import Record
from rallypoint.base.trained_time import TrainedTime

NEWEST = 32  # events that those who watch a job see
BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CAUSES = ("killed", "raised", "ended", "hang", "elsewhere")  # of losses
PARTS = ("detect", "agree", "form", "sync", "all")  # of a recovery, as in docs/events.md


class JobEvent(Record, kw_only=True):
    """Something that happened.

    Attributes:
        at: when, in seconds since 1970.
        kind: "round", "loss", "join", "hang", "hang over", "signal" or "end".
        lost_s: for how long ranks did not train because of it, where that is known.
    """

    at: float
    kind: str
    text: str
    lost_s: float = 0.0


class Durations(Record, kw_only=True):
    """How long things took, as a histogram.

    Attributes:
        counts: how many took at most as long as each of `BOUNDS_S`, and longer than the one before;
            and the number of all others.
    """

    sum_s: float = 0.0
    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)

    def with_one(self, duration_s: float) -> Durations:
        """One more."""
        counts = [*self.counts]
        counts[sum(bound < duration_s for bound in BOUNDS_S)] += 1
        return Durations(sum_s=self.sum_s + duration_s, counts=tuple(counts))

    @property
    def cumulative(self) -> tuple[int, ...]:
        """How many took at most as long as each bound; the last one: all."""
        return tuple(accumulate(self.counts))


class JobSoFar(Record, kw_only=True):
    """The latest events, and sums over all.

    Attributes:
        losses: how often ranks were lost and the job continued, by cause, one of `CAUSES`:
            "raised" an exception; "ended" before the training was over; "elsewhere": on another
            node.
        restarts: how often all workers were started anew.
        recoveries: the times of in-place recoveries, by part.
        trained: None: no steps are known.
    """

    events: tuple[JobEvent, ...] = ()
    losses: Mapping[str, int] = {}
    restarts: int = 0
    recoveries: Mapping[str, Durations] = {}
    trained: TrainedTime | None = None

    @property
    def loss_count(self) -> int:
        """How often ranks were lost."""
        return sum(self.losses.values())

    def trained_share(self, uptime_s: float) -> float | None:
        """The share of its time in which the job trained; None: no steps are known."""
        if self.trained is None or uptime_s <= 0:
            return None
        return min(1.0, self.trained.trained_s / uptime_s)

    @property
    def recovery_s(self) -> float:
        """How long in-place recoveries took."""
        return self.recoveries["all"].sum_s if "all" in self.recoveries else 0.0
