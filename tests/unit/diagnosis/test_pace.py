from __future__ import annotations

import pytest

from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.diagnosis.answer import pace
from rallypoint.diagnosis.findings import is_usual
from tests.unit.diagnosis.jobs import call, done, group


def steps(
    *, late_s: float = 0.0, count: int = 32, on_time: int = 0, step_s: float = 1.0
) -> RecordedGroup:
    """Collectives that end at once on all ranks; the others were in them for longer by `late_s`."""
    return group(
        *(
            done(n, for_s=step_s * (count - n), took_s=0.005 if n < on_time else 0.005 + late_s)
            for n in range(count)
        )
    )


@pytest.mark.parametrize("slow", range(3))
def test_who_is_in_calls_for_the_shortest_time_comes_last(slow: int) -> None:
    groups = {rank: steps(late_s=0.0 if rank == slow else 0.3) for rank in range(3)}
    found = pace(groups)
    assert found is not None
    assert (found.last, found.times, found.calls) == (slow, 32, 32)
    assert found.late_s == pytest.approx(0.3)
    assert found.step_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("late_s", "on_time", "step_s"),
    [
        pytest.param(0.011, 0, 0.1, id="less than three ticks"),
        pytest.param(0.09, 0, 1.0, id="less than a tenth of a step"),
        pytest.param(0.3, 9, 1.0, id="in 23 of 32"),
    ],
)
def test_nobody_is_blamed_for_little(late_s: float, on_time: int, step_s: float) -> None:
    groups = {
        rank: steps(late_s=0.0 if rank == 1 else late_s, on_time=on_time, step_s=step_s)
        for rank in range(3)
    }
    found = pace(groups)
    assert found is not None and found.last is None


def test_clocks_of_machines_are_not_compared() -> None:
    """One's are an hour ahead."""
    groups = {0: steps(late_s=0.3), 1: steps()}
    ahead = [done(n, for_s=(32 - n) - 3600.0, took_s=each) for n, each in enumerate([0.305] * 32)]
    found = pace({**groups, 2: group(*ahead)})
    assert found is not None and found.last == 1


def test_a_step_of_several_calls() -> None:
    """Late in the first of three calls of each step."""

    def of(first_s: float) -> RecordedGroup:
        return group(
            *(
                done(
                    n,
                    ("all_reduce", "all_gather", "barrier")[n % 3],
                    for_s=(30 - n) // 3 * 2.0 + (2 - n % 3) * 0.01,
                    took_s=first_s if n % 3 == 0 else 0.005,
                )
                for n in range(30)
            )
        )

    found = pace({0: of(0.505), 1: of(0.005), 2: of(0.505)})
    assert found is not None
    assert (found.last, found.times, found.calls) == (1, 10, 10)


def test_without_ends_nothing_is_told() -> None:
    assert pace({0: group(call(1)), 1: group(call(1))}) is None
    assert pace({}) is None


def test_what_is_usual() -> None:
    slow = [done(n, for_s=30.0 - n, took_s=10.0) for n in range(3)]
    assert is_usual(group(*slow), 12.0)
    assert not is_usual(group(*slow), 16.0)
    assert not is_usual(group(*slow[:2]), 12.0)
