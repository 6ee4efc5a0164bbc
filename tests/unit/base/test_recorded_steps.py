"""The time of a step, and the time that is left, of logs whose steps have known times."""

from __future__ import annotations

import random

import pytest

from rallypoint.base.recorded_steps import (
    RecordedSteps,
    remaining_s,
    step_time_s,
    steps_of_job,
)

Log = list[tuple[float, int]]


def steady(steps: int, step_s: float, *, first: int = 0, at_s: float = 5000.0) -> Log:
    return [(at_s + n * step_s, first + n) for n in range(steps)]


def test_a_steady_job() -> None:
    log = steady(100, 0.5, first=1000)
    assert step_time_s(log) == pytest.approx(0.5)
    assert remaining_s(log, 1099, 2099) == pytest.approx(500)
    assert remaining_s(log, 1099, 1000) == 0  # it goes on beyond what it told


def test_nothing_is_said_before_twenty_steps() -> None:
    assert step_time_s([]) is None
    assert step_time_s(steady(20, 0.5)) is None
    assert remaining_s(steady(20, 0.5), 19, 100) is None
    assert step_time_s(steady(21, 0.5)) is not None


def test_checkpoints_and_recoveries_count_as_they_came() -> None:
    """A minute in each hundred steps of a second: half as long again as the steps alone take."""
    log = [(n + 60.0 * (n // 100), n) for n in range(1001)]
    assert step_time_s(log) == pytest.approx(1.0)
    assert remaining_s(log, 1000, 2000) == pytest.approx(1600, rel=0.01)


def test_steps_that_are_done_again_are_no_progress() -> None:
    """Each ten steps, five are lost."""
    log: Log = []
    at_s, step = 0.0, 0
    for part in range(20):
        for _ in range(10):
            log.append((at_s, step))
            at_s, step = at_s + 1.0, step + 1
        step = (part + 1) * 5
    assert remaining_s(log, log[-1][1], log[-1][1] + 100) == pytest.approx(200, rel=0.1)


def test_the_last_ten_minutes_count() -> None:
    slow = steady(50, 60.0, at_s=0.0)
    log = slow + steady(1300, 1.0, first=50, at_s=slow[-1][0] + 60)
    assert step_time_s(log) == pytest.approx(1.0)


@pytest.mark.parametrize(("factor", "is_told"), [(1.1, True), (1.5, False), (0.5, False)])
def test_no_time_is_told_while_steps_change(factor: float, is_told: bool) -> None:
    begin = steady(60, 1.0)
    log = begin + steady(60, factor, first=60, at_s=begin[-1][0] + 1)
    assert (remaining_s(log, 119, 1000) is not None) == is_told


def test_a_thinned_log_tells_the_same() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    log: Log = []
    at_s = 0.0
    for step in range(4096):
        at_s += chance.uniform(0.9, 1.1)
        log.append((at_s, step))
    for stride in (1, 16):
        assert step_time_s(log[::stride]) == pytest.approx(1.0, rel=0.03)
        assert remaining_s(log[::stride], 4096, 8192) == pytest.approx(4096, rel=0.05)


def test_whom_a_job_believes() -> None:
    def of(source: str, step: int, total: int | None = None) -> RecordedSteps:
        return RecordedSteps(step=step, total=total, at_ns=0, source=source)

    assert steps_of_job([None, None]) is None
    found = steps_of_job([None, of("optimizer", 9), of("program", 3), of("program", 2)])
    assert found == of("program", 3)
    assert of("program", 25, 100).share == 0.25
    assert of("program", 25).share is None
