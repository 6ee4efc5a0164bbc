"""How far a worker's program is: its steps, and the layout of their page in its flight record.

    | presence | changes, step, total, time | values | their names | log of times | log of steps |

engine/step_record.py writes it, base/flight_record.py reads it. The log has a pair for each step
until it is full; then every second one is dropped, and from then on only every second step is
logged: it reaches back to the first step of any job, without a timer. `changes` is odd while the
page is being written; one that stays odd belongs to a worker that was killed meanwhile, and is read
all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from rallypoint.base.record import Record

PRESENCE = 5  # native/engine/flight_record.h
VERSION = 1
MOST_VALUES, NAME_BYTES = 16, 32
MOST_LOGGED = 256
# Of the page: where they are, in units of their own size.
VERSION_AT, SOURCE_AT, VALUES_AT, LOGGED_AT = 1, 10, 11, 12  # 32 bits
CHANGES_AT, STEP_AT, TOTAL_AT, TIME_AT, BEGAN_AT = 1, 2, 3, 4, 7  # 64 bits
FIRST_VALUE = 8  # float64
FIRST_NAME = 192  # bytes
FIRST_LOGGED_S = 176  # float32, after BEGAN_AT
FIRST_LOGGED_STEP = 216  # 64 bits
SOURCES = ("", "optimizer", "elastic", "program")  # the later ones replace the earlier ones

_RECENT_S = 600.0
_LEAST_STEPS = 20
_STEADY = 1.2
_LEAST_INTERVALS = 4  # that are compared with others


class RecordedSteps(Record, kw_only=True):
    """A worker's steps.

    Attributes:
        step: the last one.
        total: how many there will be; None if the program has not said so.
        at_ns: when the last one was, by the monotonic clock of the worker's machine.
        source: who counts: "program" (`rallypoint.progress`), "elastic" (`elastic.State`) or
            "optimizer" (PyTorch).
        values: what the program added by name.
        step_s: the median time of a step in the last ten minutes; None before 20 steps.
        remaining_s: how long the rest will take, from the last step on; None if the total is
            unknown, or if the recent times differ by more than a fifth.
        log: pairs of a time, in seconds of that clock, and the step then.
    """

    step: int
    total: int | None
    at_ns: int
    source: str
    values: Mapping[str, float] = {}
    step_s: float | None = None
    remaining_s: float | None = None
    log: tuple[tuple[float, int], ...] = ()

    @property
    def share(self) -> float | None:
        """How much of the total is done, at most 1; None if the total is unknown."""
        return min(1.0, self.step / self.total) if self.total else None


def steps_of_job(steps: Iterable[RecordedSteps | None]) -> RecordedSteps | None:
    """Those that a job's workers agree on, of the best source; of equal ones, the first."""
    known = [each for each in steps if each is not None]
    best = max(known, key=lambda each: (SOURCES.index(each.source), each.total or 0), default=None)
    return best


def step_time_s(log: Sequence[tuple[float, int]]) -> float | None:
    """The median time of a step in the last ten minutes of a log; None before 20 steps."""
    if not log or log[-1][1] - log[0][1] < _LEAST_STEPS:
        return None
    since_s = log[-1][0] - _RECENT_S
    recent = [pair for pair in log if pair[0] >= since_s]
    return _median_s(_step_times(recent if len(recent) > 1 else log[-2:]))


def remaining_s(log: Sequence[tuple[float, int]], step: int, total: int) -> float | None:
    """How long the steps after `step` will take.

    (total - step) x the median time of a recent step x the share of the time that was lost so far,
    to checkpoints, recoveries and steps that were done again. None before 20 steps, and while the
    times of recent steps change by more than a fifth.
    """
    step_s, usual_s = step_time_s(log), _median_s(_step_times(log))
    if step_s is None or not usual_s:
        return None
    recent = _step_times([pair for pair in log if pair[0] >= log[-1][0] - _RECENT_S])
    if len(recent) >= 2 * _LEAST_INTERVALS:
        halves = recent[: len(recent) // 2], recent[len(recent) // 2 :]
        low, high = sorted(_median(half) for half in halves)
        if high > _STEADY * low:
            return None
    trained_s = (log[-1][1] - log[0][1]) * usual_s
    elapsed_s = log[-1][0] - log[0][0]
    return max(0, total - step) * step_s * max(1.0, elapsed_s / trained_s)


def _step_times(log: Sequence[tuple[float, int]]) -> list[float]:
    """Between neighbours; those where steps were done again are left out."""
    return [
        (now_s - then_s) / (step - before)
        for (then_s, before), (now_s, step) in pairwise(log)
        if step > before and now_s > then_s
    ]


def _median_s(times: Sequence[float]) -> float | None:
    return _median(times) if times else None


def _median(numbers: Sequence[float]) -> float:
    """Of two in the middle, the greater one; statistics would cost the launcher 10 ms."""
    return sorted(numbers)[len(numbers) // 2]
