"""The pace of a group, from its last calls: which rank comes last, and how long the waits are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

    step_s: float | None = None
    steps: int = 0
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
    step_s, steps, period = _step(list(next(iter(ended.values())).values()))
    best = Pace(step_s=step_s, steps=steps)
    together = [
        number
        for number in sorted(set.intersection(*map(set, ended.values())))
        if all(calls[number].operation in JOINT_OPERATIONS for calls in ended.values())
    ]
    for phase in range(period if len(groups) > 1 else 0):
        found = _late(ended, together[phase::period])
        if found and found.late_s > best.late_s and found.late_s >= _OF_A_STEP * (step_s or 0.0):
            best = replace(found, step_s=step_s, steps=steps)
    return best


def _late(ended: Mapping[int, Mapping[int, RecordedCall]], numbers: Sequence[int]) -> Pace | None:
    """Which rank comes last in these collectives; None if none does in most of them."""
    if len(numbers) < _LEAST_CALLS:
        return None
    lateness: dict[int, list[float]] = {}
    for number in numbers:
        took = {rank: _took_s(calls[number]) for rank, calls in ended.items()}
        last = min(took, key=lambda rank: took[rank])
        late_s = median(each for rank, each in took.items() if rank != last) - took[last]
        if late_s >= _LEAST_S:
            lateness.setdefault(last, []).append(late_s)
    rank, late = max(lateness.items(), key=lambda each: len(each[1]), default=(0, []))
    if len(late) < _OFTEN * len(numbers):
        return None
    return Pace(last=rank, times=len(late), calls=len(numbers), late_s=median(late))


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
