"""The plot of a contest: time over size, one line for each contender."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rallypoint.lab.bench.bench_request import BenchmarkRequest
from rallypoint.lab.bench.contest import Row
from rallypoint.lab.bench.results import describe
from rallypoint.lab.figure import figure, logarithmic


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
