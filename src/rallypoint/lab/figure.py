"""Figures: a PNG, or a self-contained HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.lab.quantities import human_bytes, human_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_plot(path: str) -> None:
    """Check that a plot can be drawn, before there is data for it."""
    if not path.endswith((".png", ".html")):
        raise InvalidArgumentError(f"--plot {path}: name a file that ends in .png or .html")
    if find_spec("matplotlib") is None:
        raise InvalidArgumentError("--plot needs matplotlib: pip install matplotlib")


@contextmanager
def figure(path: str, title: str, below: str = "") -> Iterator[Axes]:
    """Axes to draw on, written to `path` at the end; `below` is HTML for the end of a page."""
    check_plot(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=(9, 5.5), layout="constrained")
    yield axes
    axes.set_title(title, fontsize=10)
    if path.endswith(".png"):
        drawn.savefig(path, dpi=150)
    else:
        picture = io.StringIO()
        drawn.savefig(picture, format="svg")
        Path(path).write_text(_page(title, picture.getvalue(), below))
    pyplot.close(drawn)
    print(f"written to {path}")


def logarithmic(axes: Axes, *, over_bytes: bool) -> None:
    """Set up the axes for times over sizes, or over numbers of ranks, with a grid and a legend."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("size" if over_bytes else "ranks")
    axes.yaxis.set_major_formatter(lambda value, _: human_time(value))
    if over_bytes:
        axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(fontsize=8)


def _page(title: str, picture: str, below: str) -> str:
    picture = picture[picture.index("<svg") :]
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>"
        "<style>body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        f"</style><h1>{html.escape(title)}</h1>{picture}{below}"
    )
