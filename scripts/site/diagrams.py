"""Diagrams as SVG, cards like the charts: the processes of a job, the time line of a recovery, and
the messages of algorithms, which are those of their programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

from charts import COLOURS, WIDTH, duration, label, svg

from rallypoint.schedule.catalogue import build
from rallypoint.schedule.execution import execute
from rallypoint.schedule.program import SLOTS, Buffer, Collective, Incoming, Program, Send

_MIDDLE = "text-anchor='middle'"
_ARROW = (
    "<marker id='arrow' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='8' markerHeight='8'"
    " orient='auto-start-reverse'><path d='M0 0L8 4L0 8z' fill='#333'/></marker>"
)
_TALKS = f"stroke='{COLOURS[1]}' stroke-dasharray='4 3'"
_STARTS = "stroke='#333' marker-end='url(#arrow)'"
_RANKS = 3
_RADIUS = 14


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


def ring() -> str:
    """Four ranks in a ring, and which chunk each sends in each step, with whose values in it."""
    program = build(Collective.ALL_REDUCE, "ring", ranks=4)
    middles = []
    for rank in range(program.ranks):
        angle = math.tau * rank / program.ranks
        middles.append((82 + 56 * math.sin(angle), 138 - 56 * math.cos(angle)))
    left, top, width, height = 270, 68, 73, 36
    parts = [_ARROW, label(15, 28, "ring: the messages of an all_reduce", "font-weight='bold'")]
    for rank, sends in enumerate(_messages(program)):
        parts += _rank(*middles[rank], rank, "#eef0fa", "#333")
        y = top + height * rank
        parts.append(label(left - 10, y + 22, f"rank {rank} sends", "text-anchor='end'"))
        for step, (chunk, summed, to) in enumerate(sends):
            if step == 0:
                parts.append(_edge(middles[rank], middles[to]))
            x, is_whole = left + width * step, len(summed) == program.ranks
            style = f"fill='{COLOURS[chunk]}' fill-opacity='{0.45 if is_whole else 0.15}'"
            parts.append(
                f"<rect x='{x}' y='{y}' width='{width - 4}' height='{height - 4}' {style}/>"
            )
            ranks = f"0-{program.ranks - 1}" if is_whole else "+".join(map(str, summed))
            text = f"{'ABCD'[chunk]} {ranks}"
            parts.append(label(x + width / 2 - 2, y + 21, text, f"{_MIDDLE} font-size='11'"))
    for step in range(program.sends):
        parts.append(label(left + width * (step + 0.5) - 2, top - 10, f"step {step + 1}", _MIDDLE))
    note = "A to D: the chunks of the data. Numbers: the ranks whose values are in the sum."
    parts.append(label(left, top + height * program.ranks + 16, note, "fill='#777' font-size='11'"))
    return svg(240, "An all_reduce of four ranks in a ring, step by step", parts)


def double_tree() -> str:
    """Two trees of eight ranks, each for half of the data; a rank has the same column in both."""
    program = build(Collective.ALL_REDUCE, "double_tree", ranks=8)
    parents: list[dict[int, int]] = [{} for _ in range(program.chunks)]
    for rank in range(program.ranks):
        for operation in chain.from_iterable(program.lanes(rank)):
            if isinstance(operation, Send) and operation.source.buffer is not Buffer.OUTPUT:
                (parents[operation.source.index][rank],) = operation.to
    parts = [_ARROW]
    for chunk, parent in enumerate(parents):
        left = 32 + chunk * WIDTH / 2
        title = f"double_tree: the {('first', 'second')[chunk]} half of the data"
        parts.append(label(left - 17, 28, title, "font-weight='bold'"))
        middles = {}
        for rank in range(program.ranks):
            height, above = 0, rank
            while above in parent:
                height, above = height + 1, parent[above]
            middles[rank] = (left + 42 * rank, 62 + 50 * height)
        parts += [_edge(middles[rank], middles[above]) for rank, above in parent.items()]
        for rank, middle in middles.items():
            is_inside = rank in parent.values()
            parts += _rank(
                *middle, rank, *((COLOURS[0], "#fff") if is_inside else ("#fff", "#333"))
            )
    note = "Sums go up; the result comes back down the same way. No rank is inside both trees."
    parts.append(label(15, 256, note, "fill='#777' font-size='11'"))
    return svg(270, "Two trees of eight ranks: who is inside one is a leaf of the other", parts)


def _messages(program: Program) -> list[list[tuple[int, tuple[int, ...], int]]]:
    """By rank, what it sends: the chunk, the ranks whose values are summed in it, the receiver."""
    trace = execute(program, slots=SLOTS, pieces=1)
    memory: dict[tuple[int, Buffer, int], tuple[int, ...]] = {}
    sums: list[tuple[int, ...]] = []  # by event: what it sends or stores
    sent: list[list[tuple[int, tuple[int, ...], int]]] = [[] for _ in range(program.ranks)]
    for event in trace.events:
        rank, operation, takes = trace.lanes[event.lane][0], event.operation, iter(event.takes)
        if isinstance(operation, Send):
            source = operation.source
            sums.append(memory.get((rank, source.buffer, source.index), (rank,)))
            sent[rank].append((source.index, sums[-1], operation.to[0]))
            continue
        operands = (
            sums[next(takes)]
            if isinstance(each, Incoming)
            else memory.get((rank, each.buffer, each.index), (rank,))
            for each in operation.operands
        )
        sums.append(tuple(chain.from_iterable(operands)))
        for target in operation.targets:
            memory[rank, target.buffer, target.index] = sums[-1]
    return sent


def _rank(x: float, y: float, rank: int, fill: str, colour: str) -> list[str]:
    """A rank as a circle with its number."""
    circle = f"cx='{x:.1f}' cy='{y:.1f}' r='{_RADIUS}' fill='{fill}' stroke='{COLOURS[0]}'"
    number = f"{_MIDDLE} font-weight='bold' style='fill:{colour}'"
    return [f"<circle {circle}/>", label(x, y + 4, str(rank), number)]


def _edge(begin: tuple[float, float], end: tuple[float, float]) -> str:
    """An arrow from the edge of a circle to that of another."""
    (x, y), (to_x, to_y) = begin, end
    part = _RADIUS / math.hypot(to_x - x, to_y - y)
    dx, dy = (to_x - x) * part, (to_y - y) * part
    return _line(f"M{x + dx:.1f} {y + dy:.1f}L{to_x - dx:.1f} {to_y - dy:.1f}", _STARTS)
