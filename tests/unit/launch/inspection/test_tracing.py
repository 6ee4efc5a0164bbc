"""The end of a trace: a call of another backend is counted before its name is known."""

import os
from dataclasses import dataclass
from typing import Any

import pytest

from rallypoint.launch.inspection import tracing


@dataclass
class Worker:
    """One whose call is named after some readings: all that `tracing.py` sees of a worker."""

    named_after: int
    pid: int = os.getpid()
    readings: int = 0

    @property
    def has_unnamed_calls(self) -> bool:
        return self.readings < self.named_after

    def read_record(self) -> None:
        self.readings += 1


class Clock:
    """The time, which passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, for_s: float) -> None:
        self.now += for_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "time", Clock())


def test_names_are_waited_for() -> None:
    workers: list[Any] = [Worker(named_after=3), Worker(named_after=0)]
    tracing._learn_names(workers)
    assert [worker.readings for worker in workers] == [3, 0]


def test_names_that_do_not_come_are_given_up() -> None:
    stuck, dead = Worker(named_after=1_000_000), Worker(named_after=1_000_000, pid=0)
    workers: list[Any] = [stuck, dead]
    tracing._learn_names(workers)
    assert stuck.readings == pytest.approx(tracing._NAMES_S / tracing._BETWEEN_S, abs=1)
    assert dead.readings == 0
