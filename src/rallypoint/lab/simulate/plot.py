"""Plots of the results of `rallypoint simulate`."""

from __future__ import annotations

import html
from collections import defaultdict

from rallypoint.cli.quantities import human_bytes, human_time
from rallypoint.lab.figure import figure, logarithmic
from rallypoint.lab.simulate.rows import Results
from rallypoint.lab.simulate.simulation_request import SimulationRequest


def plot(path: str, request: SimulationRequest, results: Results) -> None:
    """Draw time over size or over ranks; raises InvalidArgumentError as `figure` does."""
    over_ranks = len(request.ranks) > 1
    lines: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in results.rows:
        name = f"{row.algorithm} {row.variant}".strip()
        lines[name].append((row.ranks if over_ranks else row.bytes, row.time_us))
    what = f"{human_bytes(request.nbytes[0])}" if over_ranks else f"{request.ranks[0]} ranks"
    title = f"{request.collective}, {what}, predicted from {results.model.name}"
    with figure(path, title, _below(results)) as axes:
        for number, (name, points) in enumerate(lines.items()):
            style = ("-", "--", ":", "-.")[number // 10 % 4]
            axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
        axes.set_ylabel("predicted time")
        logarithmic(axes, over_bytes=not over_ranks)


def _below(results: Results) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(row.algorithm)}<td>{html.escape(row.variant)}<td>{row.ranks}"
        f"<td>{human_bytes(row.bytes)}<td>{human_time(row.time_us)}<td>{row.steps}"
        f"<td>{row.busbw_gb_s:.4g}"
        for row in results.rows
    )
    return (
        f"<table><tr><th>algorithm<th>variant<th>ranks<th>size<th>time<th>steps<th>busbw GB/s{rows}"
        f"</table><p>Constants: {html.escape(results.model.source)}. "
        f"{html.escape(results.model.note)}"
    )
