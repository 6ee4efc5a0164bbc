"""Trained time against what simulated jobs did."""

from __future__ import annotations

import random

import pytest

from rallypoint.base.recorded_steps import MOST_LOGGED, RecordedSteps
from rallypoint.base.trained_time import TrainedTime


def recorded(log: list[tuple[float, int]], source: str = "program") -> RecordedSteps:
    at_s, step = log[-1]
    return RecordedSteps(
        step=step, total=None, at_ns=int(at_s * 1e9), source=source, log=tuple(log)
    )


def steady(first_s: float, first: int, count: int, step_s: float = 1.0) -> list[tuple[float, int]]:
    """Steps that end one after the other."""
    return [(first_s + number * step_s, first + number) for number in range(count)]


def test_the_first_step_of_new_processes_is_not_counted() -> None:
    trained = TrainedTime().after(recorded(steady(100.0, 1, 11)))
    assert (trained.trained_s, trained.steps, trained.most) == (10.0, 10, 11)
    assert TrainedTime().after(recorded([(5.0, 1)])).trained_s == 0.0


def test_reading_the_same_steps_again_changes_nothing() -> None:
    steps = recorded(steady(100.0, 1, 11))
    once = TrainedTime().after(steps)
    assert once.after(steps) == once
    assert TrainedTime().after(recorded(steady(100.0, 1, 5))).after(steps) == once


def test_steps_that_are_done_again_do_not_count() -> None:
    before = TrainedTime().after(recorded(steady(100.0, 1, 11))).with_new_processes()
    again = before.after(recorded(steady(200.0, 8, 4)))  # steps 8 to 11
    assert again.trained_s == before.trained_s
    more = again.after(recorded(steady(200.0, 8, 9)))  # 12 to 16 are new
    assert more.trained_s == pytest.approx(before.trained_s + 5)


def test_optimizers_count_from_one_whatever_a_checkpoint_held() -> None:
    before = TrainedTime().after(recorded(steady(100.0, 1, 11), "optimizer")).with_new_processes()
    after = before.after(recorded(steady(200.0, 1, 6), "optimizer"))
    assert after.trained_s == pytest.approx(15)


def test_after_an_interruption_a_step_counts_as_much_as_others() -> None:
    """What the interrupted step had done is lost, and so is the recovery."""
    before = TrainedTime().after(recorded(steady(100.0, 1, 11))).interrupted()
    after = before.after(recorded([*steady(100.0, 1, 11), *steady(117.3, 12, 4)]))
    assert after.trained_s == pytest.approx(10 + 4)
    # A process that was not there before tells the same.
    assert before.after(recorded(steady(117.3, 12, 4))).trained_s == pytest.approx(14)


def test_random_jobs() -> None:
    """Losses, some with restarts from a checkpoint, and logs that have dropped most steps."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for _ in range(50):
        step_s, now_s, step = chance.uniform(0.01, 2.0), 1000.0, 0
        trained, most, possible = TrainedTime(), 0, 0
        log: list[tuple[float, int]] = []
        for _ in range(chance.randrange(1, 8)):
            is_restart = bool(log) and chance.random() < 0.4
            if is_restart:
                step = max(0, step - chance.randrange(20))
                trained, log, now_s = trained.with_new_processes(), [], now_s + 20
            elif log:
                trained, now_s = trained.interrupted(), now_s + chance.uniform(0.01, 5)
            for number in range(chance.randrange(30, 3000)):
                step, now_s = step + 1, now_s + step_s * chance.uniform(0.98, 1.02)
                log.append((now_s, step))
                if step > most:
                    most, possible = step, possible + bool(len(log) > 1)
                if number % 700 == 699:  # somebody reads now and then
                    trained.after(recorded(log[:: 1 + len(log) // MOST_LOGGED]))
            trained = trained.after(recorded([*log[:: 1 + len(log) // MOST_LOGGED], log[-1]]))
        assert trained.trained_s == pytest.approx(possible * step_s, rel=0.01)
