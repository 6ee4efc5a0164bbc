"""The pace of a group, from its last calls: which rank comes last, and how long the waits are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rallypoint.base.collective import JOINT_OPERATIONS
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup

_LEAST_S = 0.012  # three ticks of the coarse clock that is used for times
_LEAST_CALLS = 8
_OFTEN = 0.75  # 24 of 32
_OF_A_STEP = 0.1
_USUAL_TIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Statistics of a group's last collectives.

    Attributes:
        step_s: the time of a step; None if no period is visible.
        steps: the number of steps in that median.
        last: the rank that comes last in at least three of four collectives; None if there is none.
        times, calls: in how many collectives of how many.
        late_s: the median of its delay.
    """

    step_s: float | None
    steps: int
    last: int | None = None
    times: int = 0
    calls: int = 0
    late_s: float = 0.0


def is_usual(group: RecordedGroup, wait_s: float) -> bool:
    """Whether the calls before this one took about as long, more than once or twice.

    A job whose ranks wait for one of them in each step is slow; it does not hang.
    """
    long = [call for call in group.calls if _took_s(call) >= wait_s * 2 / 3]
    return len(long) >= _USUAL_TIMES


def pace(groups: Mapping[int, RecordedGroup]) -> Pace | None:
    """What the members' records (by rank) show together; None if nothing.

    All leave a collective at nearly the same time, so the rank that was in it for the shortest time
    came last: no clocks are compared.
    """
    ended = {
        rank: {call.number: call for call in group.calls if call.state == "done" and call.ended_ns}
        for rank, group in groups.items()
    }
    if not ended or not all(ended.values()):
        return None
    common = sorted(set.intersection(*(set(calls) for calls in ended.values())))
    step_s, steps, period = _step(list(next(iter(ended.values())).values()))
    together = [
        number
        for number in common
        if all(calls[number].operation in JOINT_OPERATIONS for calls in ended.values())
    ]
    if len(groups) < 2 or len(together) < _LEAST_CALLS:
        return Pace(step_s=step_s, steps=steps)
    best = Pace(step_s=step_s, steps=steps)
    for place in range(period):
        found = _late([ended[rank] for rank in ended], list(ended), together[place::period])
        if found is None:
            continue
        rank, times, calls, late_s = found
        if late_s > best.late_s and late_s >= _OF_A_STEP * (step_s or 0.0):
            best = Pace(
                step_s=step_s, steps=steps, last=rank, times=times, calls=calls, late_s=late_s
            )
    return best


def _late(
    calls: Sequence[Mapping[int, RecordedCall]], ranks: Sequence[int], numbers: Sequence[int]
) -> tuple[int, int, int, float] | None:
    """The last rank, how often of how many, and by how much."""
    if len(numbers) < _LEAST_CALLS:
        return None
    lateness: dict[int, list[float]] = {}
    for number in numbers:
        took = [_took_s(each[number]) for each in calls]
        least = min(took)
        place = took.index(least)
        others = took[:place] + took[place + 1 :]
        late_s = median(others) - least
        if late_s >= _LEAST_S:
            lateness.setdefault(ranks[place], []).append(late_s)
    if not lateness:
        return None
    rank = max(lateness, key=lambda each: len(lateness[each]))
    times = len(lateness[rank])
    if times < _OFTEN * len(numbers):
        return None
    return rank, times, len(numbers), median(lateness[rank])


def _step(calls: Sequence[RecordedCall]) -> tuple[float | None, int, int]:
    """The time of a step, the number of steps in that median, and the number of calls in a step."""
    kinds = [(call.operation, call.dtype, call.count, call.shape) for call in calls]
    for period in range(1, len(calls) // 2 + 1):
        if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
            took = [
                (calls[i].ended_ns - calls[i - period].ended_ns) / 1e9
                for i in range(period, len(calls))
            ]
            return median(took), len(took), period
    return None, 0, 1


def _took_s(call: RecordedCall) -> float:
    return (call.ended_ns - call.since_ns) / 1e9 if call.ended_ns else 0.0
