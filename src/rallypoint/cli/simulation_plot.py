"""Plots of what `rallypoint simulate` found: PNG, or an HTML page that needs nothing else."""

from __future__ import annotations

import html
import io
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.cli.simulation_request import Request
from rallypoint.cli.simulation_rows import Results, human_bytes, human_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(path: str, request: Request, results: Results) -> None:
    """Draw time over size or over ranks.

    Raises:
        InvalidArgumentError: matplotlib is missing, or the file is neither .png nor .html.
    """
    if not path.endswith((".png", ".html")):
        raise InvalidArgumentError(f"--plot {path}: name a file that ends in .png or .html")
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise InvalidArgumentError(
            "--plot needs matplotlib: pip install 'rallypoint[plot]'"
        ) from error
    figure, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    _draw(axes, request, results)
    if path.endswith(".png"):
        figure.savefig(path, dpi=150)
    else:
        picture = io.StringIO()
        figure.savefig(picture, format="svg")
        Path(path).write_text(_page(_title(request, results), picture.getvalue(), results))
    pyplot.close(figure)
    print(f"written to {path}")


def _draw(axes: Axes, request: Request, results: Results) -> None:
    over_ranks = len(request.ranks) > 1
    lines: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in results.rows:
        name = f"{row.algorithm} {row.variant}".strip()
        lines[name].append((row.ranks if over_ranks else row.bytes, row.time_us))
    for number, (name, points) in enumerate(lines.items()):
        style = ("-", "--", ":", "-.")[number // 10 % 4]
        axes.plot(*zip(*points, strict=True), style, marker="o", markersize=3, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks" if over_ranks else "size")
    axes.set_ylabel("predicted time")
    axes.yaxis.set_major_formatter(lambda value, _: human_time(value))
    if not over_ranks:
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(_title(request, results), fontsize=10)


def _title(request: Request, results: Results) -> str:
    what = (
        f"{human_bytes(request.nbytes[0])}"
        if len(request.ranks) > 1
        else f"{request.ranks[0]} ranks"
    )
    return f"{request.collective}, {what}, predicted from {results.model.name}"


def _page(title: str, picture: str, results: Results) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(row.algorithm)}<td>{html.escape(row.variant)}<td>{row.ranks}"
        f"<td>{human_bytes(row.bytes)}<td>{human_time(row.time_us)}<td>{row.steps}"
        f"<td>{row.busbw_gb_s:.4g}"
        for row in results.rows
    )
    picture = picture[picture.index("<svg") :]
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        f"</style><h1>{html.escape(title)}</h1>{picture}<table><tr><th>algorithm<th>variant"
        f"<th>ranks<th>size<th>time<th>steps<th>busbw GB/s{rows}</table>"
        f"<p>Constants: {html.escape(results.model.source)}. {html.escape(results.model.note)}"
    )
