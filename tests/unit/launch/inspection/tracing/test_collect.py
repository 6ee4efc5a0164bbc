"""The end of a trace: a call of another backend is counted before its name is known."""

import os
from dataclasses import dataclass
from typing import Any

from rallypoint.launch.inspection.tracing import collect


@dataclass
class Worker:
    """One whose call is named after some looks; `collect` sees no more of a worker than this."""

    named_after: int
    pid: int = os.getpid()
    looks: int = 0

    @property
    def has_unnamed_calls(self) -> bool:
        return self.looks < self.named_after

    def look(self) -> None:
        self.looks += 1


def test_names_are_waited_for() -> None:
    workers: list[Any] = [Worker(named_after=3), Worker(named_after=0)]
    collect._learn_names(workers)
    assert [worker.looks for worker in workers] == [3, 0]


def test_names_that_do_not_come_are_given_up() -> None:
    stuck, dead = Worker(named_after=1_000_000), Worker(named_after=1_000_000, pid=0)
    workers: list[Any] = [stuck, dead]
    collect._learn_names(workers)
    assert 1 < stuck.looks < 1000
    assert dead.looks == 0
