"""The contest: every size with every contender, in turn, many times.

Other load on the machine comes and goes. It affects all contenders equally if each is measured for
a moment at a time, repeatedly, in a changing order. Contenders sleep when it is not their turn.
"""

from __future__ import annotations

import signal
import statistics
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rallypoint.lab.bench import BenchmarkRequest
from rallypoint.lab.bench.contenders import OURS
from rallypoint.lab.bench.crew import CrewError
from rallypoint.schedule.choose import is_file

_TURN_S = 0.02
_FEWEST_CALLS = 2


@dataclass(slots=True)
class Row:
    """One size: each contender's time in each turn, and the number of wrong items."""

    count: int
    nbytes: int
    times_us: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)

    def time_us(self, name: str) -> float | None:
        """The median; None if the contender did not take part."""
        return statistics.median(self.times_us[name]) if self.times_us.get(name) else None


class ContenderProcesses(Protocol):
    """All processes of a contender, on all hosts."""

    name: str
    version: str

    def ask(self, order: Mapping[str, object]) -> list[dict[str, Any]]:
        """Send an order to all at once; returns their answers."""

    def end(self) -> None:
        """Make sure that all have ended."""


class ContenderStarter(Protocol):
    """Starts contenders, here or on other hosts."""

    def start(self, name: str, begin: Mapping[str, object]) -> ContenderProcesses:
        """Start the processes of a contender."""

    def close(self) -> None:
        """End everything that was started."""


class Contest:
    """Contenders that are ready to be measured. Use it as a context manager: leaving it ends them
    all.
    """

    def __init__(self, request: BenchmarkRequest, starter: ContenderStarter) -> None:
        self._request = request
        self._starter = starter
        algorithm = request.algorithm
        self._begin = {
            "operation": request.operation,
            "op": request.op,
            "dtype": request.dtype,
            "algorithm": str(Path(algorithm).absolute()) if is_file(algorithm) else algorithm,
            "backend": request.backend,
            "most_items": max(request.counts),
        }
        self._teams: list[ContenderProcesses] = []

    def __enter__(self) -> Contest:
        try:
            for name in (OURS, *self._request.peers):
                print(f"starting {name}", file=sys.stderr)
                self._teams.append(self._starter.start(name, self._begin))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # we are already ending
        self._starter.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def versions(self) -> dict[str, str]:
        """The version that each contender reports."""
        return {team.name: team.version for team in self._teams}

    def rows(self) -> Iterator[Row]:
        """Measure each size in turn.

        A contender that fails is reported and left out; if it is ours, CrewError is raised.
        """
        for count in self._request.counts:
            row = Row(count, self._request.bytes_of(count))
            calls: dict[str, int] = {}
            for team in list(self._teams):
                with self._forgiving(team):
                    answers = team.ask({"order": "check", "count": count})
                    row.wrong[team.name] = sum(answer["wrong"] for answer in answers)
                    calls[team.name] = self._request.calls or self._calls_for(team, count)
            for turn in range(self._request.rounds):
                first = turn % len(self._teams)
                for team in self._teams[first:] + self._teams[:first]:
                    with self._forgiving(team):
                        time_us = self._time_us(team, count, calls[team.name])
                        row.times_us.setdefault(team.name, []).append(time_us)
            yield row

    def _time_us(self, team: ContenderProcesses, count: int, calls: int) -> float:
        """The time of one call on the slowest rank."""
        warmup = self._request.warmup
        if warmup is None:
            warmup = max(1, calls // 10)
        order = {"order": "time", "count": count, "calls": calls, "warmup": warmup}
        slowest_s: float = max(answer["seconds"] for answer in team.ask(order))
        one_way = 2 if self._request.operation == "send" else 1
        return slowest_s / calls / one_way * 1e6

    def _calls_for(self, team: ContenderProcesses, count: int) -> int:
        """The number of calls that fill a turn."""
        calls = _FEWEST_CALLS
        while True:
            took_s = self._time_us(team, count, calls) * calls / 1e6
            if took_s > _TURN_S / 10:
                return max(_FEWEST_CALLS, int(_TURN_S / took_s * calls))
            calls *= 8

    @contextmanager
    def _forgiving(self, team: ContenderProcesses) -> Iterator[None]:
        """Leave out a contender that fails, unless it is ours."""
        try:
            yield
        except CrewError as error:
            if team.name == OURS:
                raise
            print(f"left out from now on: {error}", file=sys.stderr)
            self._teams.remove(team)
            team.end()
