"""Charts as SVG: lines over sizes, and bars. They are cards with their own background, legible on a
light and on a dark page. The same numbers give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#3f51b5", "#e67e22", "#2e8b57", "#c0392b", "#7f8c8d")  # the first is Rallypoint's
_STYLE = "font-family='system-ui, sans-serif' font-size='12' fill='#333'"
WIDTH = 720
_PANEL = WIDTH // 2

Points = Sequence[tuple[int, float]]  # bytes, microseconds


def svg(height: int, alternative: str, parts: Sequence[str]) -> str:
    """A card with these elements, and the text for readers who do not see it."""
    box = f"viewBox='0 0 {WIDTH} {height}'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {box} role='img' {_STYLE}>"
    card = f"<rect width='{WIDTH}' height='{height}' rx='6' fill='#fff' stroke='#ddd'/>"
    return "\n".join([head, f"<title>{escape(alternative)}</title>", card, *parts, "</svg>", ""])


def label(x: float, y: float, text: str, more: str = "") -> str:
    """A text, with more attributes."""
    return f"<text x='{x:.1f}' y='{y:.1f}' {more}>{escape(text)}</text>"


def lines(alternative: str, panels: Mapping[str, Mapping[str, Points]]) -> str:
    """Two panels of time over size. Axes are logarithmic and shared; a name has one colour."""
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    points = [each for series in panels.values() for line in series.values() for each in line]
    least, most = min(size for size, _ in points), max(size for size, _ in points)
    low = math.floor(math.log10(min(us for _, us in points)))
    high = math.ceil(math.log10(max(us for _, us in points)))
    top, bottom, left, right = 50, 290, 60, 25

    def x(size: int) -> float:
        return (math.log2(size) - math.log2(least)) / (math.log2(most) - math.log2(least))

    def y(us: float) -> float:
        return bottom - (math.log10(us) - low) / (high - low) * (bottom - top)

    parts = []
    for column, (title, series) in enumerate(panels.items()):
        begin, width = column * _PANEL + left, _PANEL - left - right
        parts.append(label(begin, 28, title, "font-weight='bold'"))
        for power in range(low, high + 1):
            at = y(10.0**power)
            parts.append(f"<path d='M{begin} {at:.1f}h{width}' stroke='#ddd'/>")
            parts.append(label(begin - 6, at + 4, duration(10.0**power), "text-anchor='end'"))
        for size in (8, 1 << 10, 64 << 10, 1 << 20, 64 << 20):
            at = begin + x(size) * width
            parts.append(label(at, bottom + 18, bytes_of(size), "text-anchor='middle'"))
        for name, line in series.items():
            path = " ".join(f"{begin + x(size) * width:.1f},{y(us):.1f}" for size, us in line)
            style = f"fill='none' stroke='{COLOURS[names.index(name)]}' stroke-width='2'"
            parts.append(f"<polyline points='{path}' {style}/>")
    for column, name in enumerate(names):
        at = left + column * 125
        colour = COLOURS[column]
        parts.append(f"<rect x='{at}' y='322' width='14' height='4' fill='{colour}'/>")
        parts.append(label(at + 20, 328, name))
    return svg(340, alternative, parts)


def bars(alternative: str, panels: Mapping[str, Mapping[str, tuple[float, str]]]) -> str:
    """Panels in two columns. A panel has a bar for each name: its length, and its label."""
    parts = []
    lengths = [len(each) for each in panels.values()]
    heights = [44 + 24 * max(lengths[first : first + 2]) for first in range(0, len(lengths), 2)]
    for number, (title, values) in enumerate(panels.items()):
        left, top = number % 2 * _PANEL + 15, sum(heights[: number // 2]) + 28
        parts.append(label(left, top, title, "font-weight='bold'"))
        longest = max(value for value, _ in values.values())
        for row, (name, (value, said)) in enumerate(values.items()):
            at = top + 14 + row * 24
            width = max(1.0, value / longest * 130)
            colour = COLOURS[0] if name.startswith("Rallypoint") else COLOURS[4]
            parts.append(label(left + 134, at + 12, name, "text-anchor='end'"))
            bar = f"x='{left + 140}' y='{at}' width='{width:.1f}' height='16' fill='{colour}'"
            parts.append(f"<rect {bar}/>")
            parts.append(label(left + 146 + width, at + 12, said))
    return svg(sum(heights) + 6, alternative, parts)


def duration(us: float) -> str:
    """0.47 -> "0.47 us", 3145000 -> "3.14 s"; three digits."""
    for unit, size in (("s", 1e6), ("ms", 1e3), ("us", 1.0)):
        if us >= size or unit == "us":
            return f"{us / size:.3g} {unit}"
    raise AssertionError


def bytes_of(size: int) -> str:
    """8 -> "8 B", 262144 -> "256 KiB"."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"
