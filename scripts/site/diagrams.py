"""Diagrams as SVG, cards like the charts: the processes of a job; the time line of a recovery."""

from __future__ import annotations

from collections.abc import Mapping

from charts import COLOURS, WIDTH, duration, label, svg

_MIDDLE = "text-anchor='middle'"
_ARROW = (
    "<marker id='arrow' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' markerHeight='8'"
    " orient='auto-start-reverse'><path d='M0 0L8 4L0 8z' fill='#333'/></marker>"
)
_TALKS = f"stroke='{COLOURS[1]}' stroke-dasharray='4 3'"
_STARTS = "stroke='#333' marker-end='url(#arrow)'"
_RANKS = 3


def _box(x: float, y: float, width: float, *lines: str) -> list[str]:
    """A process: its name, and what it does."""
    height = 12 + 16 * len(lines)
    name, *rest = lines
    weight = "font-weight='bold'" if rest else ""
    return [
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='4' fill='#eef0fa'"
        f" stroke='{COLOURS[0]}'/>",
        label(x + width / 2, y + 18, name, f"{_MIDDLE} {weight}"),
        *(label(x + width / 2, y + 34 + 16 * row, line, _MIDDLE) for row, line in enumerate(rest)),
    ]


def _line(path: str, style: str) -> str:
    return f"<path d='{path}' fill='none' {style}/>"


def processes() -> str:
    """Two nodes: what starts their launchers, the guardians, the workers, and who talks to whom."""
    width = 330
    parts = [_ARROW, *_box(WIDTH / 2 - 120, 14, 240, "you, ssh, srun, a pod, Ray, ...")]
    for node, duty in enumerate(("coordinator; serves the store", "follows the coordinator")):
        left = 15 + node * (WIDTH - width - 30)
        middle = left + width / 2
        parts += [
            f"<rect x='{left}' y='72' width='{width}' height='262' rx='6' fill='none'"
            " stroke='#bbb'/>",
            label(left + 10, 90, f"node {node}", "fill='#777'"),
            *_box(middle - 105, 96, 210, "agent: rallypoint run", duty),
            *_box(middle - 105, 180, 210, "guardian", "ends all if the agent dies"),
            _line(f"M{WIDTH / 2} 42L{middle} 94", _STARTS),
            _line(f"M{middle} 140V178", _STARTS),
        ]
        for rank in range(_RANKS):
            at = left + 12 + rank * 104
            parts += _box(at, 270, 98, f"worker, rank {node * _RANKS + rank}")
            parts.append(_line(f"M{middle} 224L{at + 49} 268", _STARTS))
        edge = left + 24
        parts.append(_line(f"M{edge} 268V130H{middle - 105}", _TALKS))
        parts.append(_line(f"M{left + 61} 298V312H{left + width - 61}V298", _TALKS))
        parts.append(label(middle, 326, "shared memory", f"{_MIDDLE} font-size='11'"))
        parts.append(label(edge + 4, 162, "control", "font-size='11'"))
        parts.append(label(edge + 4, 175, "sockets", "font-size='11'"))
    between = f"M{15 + width / 2 + 105} 112H{WIDTH - 15 - width / 2 - 105}"
    parts.append(_line(between, _TALKS))
    parts.append(label(WIDTH / 2, 106, "reports, orders", f"{_MIDDLE} font-size='11'"))
    first, last = 15 + 12 + (_RANKS - 1) * 104 + 98, WIDTH - 15 - width + 12
    parts.append(_line(f"M{first} 284H{last}", _TALKS))
    parts.append(label(WIDTH / 2, 279, "TCP", f"{_MIDDLE} font-size='11'"))
    parts += [_line("M20 352H50", _STARTS), label(58, 356, "starts")]
    parts += [_line("M130 352H160", _TALKS), label(168, 356, "is connected to")]
    title = "On each node, an agent starts a guardian, which starts the workers"
    return svg(370, title, parts)


def time_line(alternative: str, title: str, phases: Mapping[str, float]) -> str:
    """One row for each phase, in milliseconds, beginning where the one before has ended."""
    total, left, top = sum(phases.values()), 270, 46
    scale = (WIDTH - left - 80) / total
    bottom = top + 26 * len(phases)
    parts = [label(15, 28, title, "font-weight='bold'")]
    for ms in range(0, int(total) + 1, 5):
        x = left + ms * scale
        parts.append(f"<path d='M{x:.1f} {top - 6}V{bottom}' stroke='#ddd'/>")
        parts.append(label(x, bottom + 16, f"{ms} ms", _MIDDLE))
    begin = 0.0
    for row, (name, ms) in enumerate(phases.items()):
        x, y = left + begin * scale, top + 26 * row
        bar = f"x='{x:.1f}' y='{y}' width='{ms * scale:.1f}' height='18' fill='{COLOURS[0]}'"
        parts.append(label(left - 10, y + 13, name, "text-anchor='end'"))
        parts.append(f"<rect {bar}/>")
        parts.append(label(x + ms * scale + 6, y + 13, duration(ms * 1e3)))
        begin += ms
    return svg(bottom + 28, alternative, parts)
