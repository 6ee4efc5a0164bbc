"""The contest: every size with every contender, in turn, many times.

What else goes on in the machine comes and goes; it hits all alike if each is measured for a moment
at a time, again and again, in an order that changes. Those whose turn it is not sleep.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rallypoint.cli.benchmark.contenders import OURS, Contender
from rallypoint.cli.benchmark.crew import Crew, CrewError
from rallypoint.cli.benchmark.request import Request

_TURN_S = 0.02
_FEWEST_CALLS = 2


@dataclass(slots=True)
class Row:
    """One size: what each contender needed, turn by turn, and how many items were wrong."""

    count: int
    nbytes: int
    times_us: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, int] = field(default_factory=dict)

    def time_us(self, name: str) -> float | None:
        """The median; None for who did not take part."""
        return statistics.median(self.times_us[name]) if self.times_us.get(name) else None


class Contest:
    """Contenders that are ready. Leave it as a context, and nothing is left of them."""

    def __init__(
        self, request: Request, contenders: Sequence[Contender], cores: Sequence[int]
    ) -> None:
        self._request = request
        self._contenders = contenders
        self._begin = {
            "operation": request.operation,
            "op": request.op,
            "dtype": request.dtype,
            "algorithm": request.algorithm,
            "backend": request.backend,
            "most_items": max(request.counts),
            "cores": list(cores) if request.pin else [],
        }
        self._crews: list[Crew] = []
        self._directory = tempfile.TemporaryDirectory(prefix="rallypoint-bench-")

    def __enter__(self) -> Contest:
        signal.signal(signal.SIGTERM, _terminated)
        try:
            for contender in self._contenders:
                print(f"starting {contender.name}", file=sys.stderr)
                crew = Crew(
                    contender.name,
                    contender.command,
                    contender.environ,
                    ranks=self._request.ranks,
                    directory=Path(self._directory.name, contender.name),
                    begin=self._begin,
                )
                self._crews.append(crew)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # we are going
        for crew in self._crews:
            crew.dismiss()
        for crew in self._crews:
            crew.end()
        self._directory.cleanup()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    @property
    def versions(self) -> dict[str, str]:
        """What each contender says it is."""
        return {crew.name: crew.version for crew in self._crews}

    def rows(self) -> Iterator[Row]:
        """Measure size by size.

        Raises:
            CrewError: ours cannot go on. Of others it is told, and the contest goes on without.
        """
        for count in self._request.counts:
            row = Row(count, self._request.bytes_of(count))
            calls: dict[str, int] = {}
            for crew in list(self._crews):
                with self._forgiving(crew):
                    answers = crew.ask({"order": "check", "count": count})
                    row.wrong[crew.name] = sum(answer["wrong"] for answer in answers)
                    calls[crew.name] = self._request.calls or self._calls_for(crew, count)
            for turn in range(self._request.rounds):
                first = turn % len(self._crews)
                for crew in self._crews[first:] + self._crews[:first]:
                    with self._forgiving(crew):
                        time_us = self._time_us(crew, count, calls[crew.name])
                        row.times_us.setdefault(crew.name, []).append(time_us)
            yield row

    def _time_us(self, crew: Crew, count: int, calls: int) -> float:
        """How long one call takes the slowest rank."""
        warmup = self._request.warmup
        if warmup is None:
            warmup = max(1, calls // 10)
        order = {"order": "time", "count": count, "calls": calls, "warmup": warmup}
        slowest_s: float = max(answer["seconds"] for answer in crew.ask(order))
        one_way = 2 if self._request.operation == "send" else 1
        return slowest_s / calls / one_way * 1e6

    def _calls_for(self, crew: Crew, count: int) -> int:
        """How many fill a turn."""
        calls = _FEWEST_CALLS
        while True:
            took_s = self._time_us(crew, count, calls) * calls / 1e6
            if took_s > _TURN_S / 10:
                return max(_FEWEST_CALLS, int(_TURN_S / took_s * calls))
            calls *= 8

    @contextmanager
    def _forgiving(self, crew: Crew) -> Iterator[None]:
        """Leave a contender out that cannot go on, unless it is ours."""
        try:
            yield
        except CrewError as error:
            if crew.name == OURS:
                raise
            print(f"left out from here on: {error}", file=sys.stderr)
            self._crews.remove(crew)
            crew.end()


def _terminated(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
