"""The results of a contest: nccl-tests' table with a column for each contender, JSON, and a plot:
time over size, one line for each contender.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rallypoint.lab.bench import BenchmarkRequest
from rallypoint.lab.bench.contenders import OURS
from rallypoint.lab.bench.contest import Row
from rallypoint.lab.figure import figure, logarithmic
from rallypoint.lab.quantities import bus_factor

_OURS_COLUMNS = (("bytes", ""), ("count", ""), ("type", ""), ("op", ""), ("time", "us"),
                 ("algbw", "GB/s"), ("busbw", "GB/s"), ("#wrong", ""))  # fmt: skip
_WIDTHS = (11, 10, 8, 8, 10, 8, 8, 7)
_PEER_WIDTH = 11


class Table:
    """Prints rows as they come."""

    def __init__(
        self, request: BenchmarkRequest, versions: Mapping[str, str], machines: str
    ) -> None:
        self._request = request
        self._peers = [name for name in versions if name != OURS]
        self._remarks: list[str] = []
        print(f"# {describe(request)}; {', '.join(f'{n} ({v})' for n, v in versions.items())}")
        print(f"# {machines}")
        columns = [*_OURS_COLUMNS, *((name, "us") for name in self._peers)]
        if self._peers:
            columns.append(("ahead", "times"))
        self._print([name for name, _ in columns])
        self._print([unit for _, unit in columns])

    def add(self, row: Row) -> None:
        """Print a row."""
        found = {name: result_of(self._request, row, name) for name in (OURS, *self._peers)}
        ours = found[OURS]
        op = self._request.op if self._request.collective.reduces else "-"
        cells = [str(row.nbytes), str(row.count), self._request.dtype, op]
        cells += [_short(ours.time_us), _short(ours.algbw_gb_s), _short(ours.busbw_gb_s)]
        cells.append(str(ours.wrong))
        for name in self._peers:
            wrong = found[name].wrong
            cells.append(_short(found[name].time_us) + ("!" if wrong else ""))
            if wrong:
                self._remarks.append(f"! {name}: {wrong} wrong items at {row.nbytes} bytes")
        if self._peers:
            times = [each.time_us for name, each in found.items() if name != OURS and each.time_us]
            cells.append(f"{min(times) / ours.time_us:.2f}" if times and ours.time_us else "-")
        self._print(cells)

    def end(self, load: str) -> None:
        """Print the lines below the table; `load` describes how busy the machine was."""
        for remark in self._remarks:
            print(remark)
        if self._peers:
            print("# ahead: the time of the fastest peer over Rallypoint's")
        if load:
            print(f"# {load}, this benchmark included; whatever else runs distorts the times")

    def _print(self, cells: Sequence[str]) -> None:
        widths = [*_WIDTHS, *[_PEER_WIDTH] * len(cells)]
        padded = [cell.rjust(width) for cell, width in zip(cells, widths, strict=False)]
        print("".join(padded), flush=True)


@dataclass(frozen=True, slots=True)
class Result:
    """One contender's result at one size; bandwidths as nccl-tests define them."""

    time_us: float | None
    algbw_gb_s: float | None
    busbw_gb_s: float | None
    wrong: int | None
    times_us: list[float]


def result_of(request: BenchmarkRequest, row: Row, name: str) -> Result:
    """Compute it from the times that were measured."""
    time_us = row.time_us(name)
    algbw = row.nbytes / time_us / 1e3 if time_us and row.nbytes else None
    busbw = algbw * bus_factor(request.collective, request.ranks) if algbw else None
    return Result(time_us, algbw, busbw, row.wrong.get(name), row.times_us.get(name, []))


def write_json(
    path: str,
    request: BenchmarkRequest,
    versions: Mapping[str, str],
    machines: str,
    rows: Sequence[Row],
) -> None:
    """Write all results, including each turn's time, with the date and the command."""
    data = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": shlex.join(["rallypoint", *sys.argv[1:]]),
        "request": asdict(request),
        "contenders": dict(versions),
        "place": machines,
        "rows": [
            {
                "bytes": row.nbytes,
                "count": row.count,
                "results": {name: asdict(result_of(request, row, name)) for name in versions},
            }
            for row in rows
        ],
    }
    Path(path).write_text(json.dumps(data, indent=2) + "\n")


def describe(request: BenchmarkRequest) -> str:
    """What was measured, in a few words."""
    hosts = f" on {len(request.hosts)} hosts" if request.hosts else ""
    words = [f"{request.operation}, {request.ranks} ranks{hosts}"]
    words += [request.algorithm] if request.algorithm else []
    words += [request.backend] if request.backend != OURS else []
    words.append("each rank pinned to a core" if request.pin else "default placement")
    words.append(f"medians of {request.rounds} rounds")
    return ", ".join(words)


def plot(
    path: str, request: BenchmarkRequest, versions: Mapping[str, str], rows: Sequence[Row]
) -> None:
    """Draw the plot; raises InvalidArgumentError as `figure` does."""
    with figure(path, describe(request)) as axes:
        for name in versions:
            points = [(row.nbytes, row.time_us(name)) for row in rows if row.time_us(name)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set_ylabel("time")
        logarithmic(axes, over_bytes=True)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 1e5 else f"{value:.0f}"
