"""A screen of `rallypoint top`, as lines of text. Pure.

Whatever comes from the job may hold sequences that a terminal obeys: each piece of text passes
`printable`, and only `_paint` adds sequences. No state is shown by its colour alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import localtime, strftime
from unicodedata import combining, east_asian_width

from rallypoint.base.job_so_far import JobEvent
from rallypoint.base.wording import one_line
from rallypoint.diagnosis.job_view import STALLED_S, JobView, RankState, RankView
from rallypoint.launch.output.progress import duration, share

MOST_IN_TABLE = 40  # ranks; of more, each is a letter
OLD_S = 3.0
KEYS = "q quit  Enter rank  e evidence  s sort  n node  / filter  t trace  l log  ? help"
HELP = """\
up, down     choose a rank; page up and page down scroll
Enter        its Python stack, and the last lines that it has written
e            the evidence: who waits for whom, and where
l            the last lines that all ranks on this machine have written
t            trace the job for 5 s, into a file for Perfetto
s            sort by lateness, rank, time in the call, waiting, CPU or memory
n            only the ranks of a node: its rank or its host; empty: all
/            only ranks with this text in their line; empty: all
p            pause, and go on
Escape       back
q            quit

Nothing here changes the job. Enter and e look at its workers once, for a second.

STATE    runs; waits (in a call); kernel (cannot be interrupted there);
         stopped (by a signal); ended; starts; silent (so is its machine)
WAITS    the share of the time that it could not continue without others
LATE     by how much it comes later than others in each step; where steps are
         not known, in each call. ! marks a rank that others wait for
NOCORE   the share of the time in which it was ready, and got no core
AT       the line of your program, where a call has waited for some time

Rates are of the last ten seconds."""
_MOST_OF_HEADLINE = 4  # lines
_LEAST_WORST = 5  # rows of a table below letters
_BARS = "▁▂▃▄▅▆▇█"
_SGR = {"bold": "1", "dim": "2", "red": "31", "yellow": "33", "green": "32", "chosen": "7"}
_STYLES = {
    RankState.KERNEL: "red",
    RankState.STOPPED: "red",
    RankState.ENDED: "red",
    RankState.SILENT: "red",
    RankState.WAITS: "dim",
}
_LETTERS = {
    RankState.RUNS: ".",
    RankState.WAITS: "w",
    RankState.KERNEL: "k",
    RankState.STOPPED: "t",
    RankState.ENDED: "x",
    RankState.STARTS: "s",
    RankState.SILENT: "?",
}
_LEGEND = ". runs  w waits  L late  ! at fault  k kernel  t stopped  x ended  s starts  ? silent"
_RANKS_TOGETHER = 8
_LEAST_SHARE = 0.05  # of the time: less lateness is chance


@dataclass(frozen=True, slots=True)
class Page:
    """Text that is shown instead of the ranks."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What the user has chosen.

    Attributes:
        node, text: show only ranks of that node, and with that text; empty: all.
        rank: the chosen one.
        first: the first row, or line of a page, that is shown.
        prompt, typed: what is being asked of the user, and the answer so far; empty: nothing.
        note: the result of a key.
        speeds: recent rates, the latest last.
    """

    sort: str = "late"
    node: str = ""
    text: str = ""
    rank: int | None = None
    first: int = 0
    is_paused: bool = False
    prompt: str = ""
    typed: str = ""
    page: Page | None = None
    note: str = ""
    speeds: tuple[float, ...] = ()


Piece = tuple[str, str]  # text, and its style


@dataclass(frozen=True, slots=True)
class _Column:
    head: str  # with the width that is usual, so that the columns stay where they are
    cell: Callable[[RankView], str]
    least: int = 0  # its width; of those that are wide: 0
    is_left: bool = False


def _first(value: float | None) -> float:
    return -1.0 if value is None else value


def _lateness(rank: RankView) -> tuple[float, ...]:
    """Who keeps others waiting comes first; ranks that differ by chance stay where they are."""
    is_away = not rank.is_in_call and (rank.for_s or 0.0) > STALLED_S
    share = rank.late_share or 0.0
    late = share if share >= _LEAST_SHARE else 0.0
    is_bad = rank.state not in (RankState.RUNS, RankState.WAITS)
    return (-rank.is_at_fault, -rank.is_slow, -is_away, -is_bad, -late)


SORTS: dict[str, Callable[[RankView], tuple[float, ...]]] = {
    "late": _lateness,
    "rank": lambda _: (),
    "for": lambda rank: (-_first(rank.for_s),),
    "waits": lambda rank: (-_first(rank.waited),),
    "CPU": lambda rank: (-_first(rank.cpu),),
    "memory": lambda rank: (-rank.rss_bytes,),
}


def shown_ranks(view: JobView, choices: Choices) -> list[RankView]:
    """The ranks to show, in their order."""
    found = [
        rank
        for rank in view.ranks
        if (not choices.node or choices.node in (str(rank.node_rank), rank.host))
        and choices.text.lower() in _searched(rank).lower()
    ]
    return sorted(found, key=lambda rank: (*SORTS[choices.sort](rank), rank.rank))


def frame(
    name: str,
    view: JobView | None,
    choices: Choices,
    columns: int,
    rows: int,
    *,
    has_colours: bool,
) -> list[str]:
    """The lines of a screen of that size.

    Args:
        name: the job's.
        view: None: nothing was told yet.
        rows: 0: as many as there are to tell, without keys.
    """
    lines = _top(name, view, choices, columns)
    event = _latest_event(view) if choices.page is None else []
    bottom = [*event, *(_bottom(view, choices, columns) if rows else [])][-rows:]
    room = max(0, rows - len(lines) - len(bottom)) if rows else 1 << 30
    if choices.page is not None:
        lines += _page(choices.page, choices.first, columns, room)
    elif view is not None and view.ranks:
        lines += _ranks(view, choices, columns, room)
    if rows:
        lines = lines[: rows - len(bottom)]
        lines += [[]] * (rows - len(bottom) - len(lines))
    lines += bottom
    return [_paint(line, columns, has_colours=has_colours) for line in lines]


def width(text: str) -> int:
    """How many columns it takes."""
    return sum(map(_width, text))


def cut(text: str, columns: int) -> str:
    """At most that wide."""
    if len(text) <= columns and text.isascii():
        return text
    if width(text) <= columns:
        return text
    return f"{_beginning(text, columns - 1)}…" if columns > 0 else ""


def _beginning(text: str, columns: int) -> str:
    """As much of it as is at most that wide."""
    for end, each in enumerate(text):
        columns -= _width(each)
        if columns < 0:
            return text[:end]
    return text


def _width(character: str) -> int:
    if character.isascii():
        return 1
    if combining(character):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def _paint(pieces: Sequence[Piece], columns: int, *, has_colours: bool) -> str:
    """A line of these pieces, cut to the width."""
    line, room = "", columns
    for text, style in pieces:
        shown = cut(one_line(text), room)
        room -= width(shown)
        is_painted = has_colours and style and shown
        line += f"\x1b[{_SGR[style]}m{shown}\x1b[0m" if is_painted else shown
        if room <= 0:
            break
    return line if has_colours else line.rstrip()


def _top(name: str, view: JobView | None, choices: Choices, columns: int) -> list[list[Piece]]:
    if view is None:
        return [[(name, "bold")], [("waits for what its nodes tell", "")]]
    nodes = f"{view.node_count} node{'s' * (view.node_count != 1)}"
    about = f"  round {view.round}  {view.world_size} ranks, {nodes}" if view.round >= 0 else ""
    state = f"{view.phase} {duration(view.uptime_s)}"
    if view.status is not None and view.ended_s is not None:
        state = f"{ended(view.status, view.ended_s)}, after {duration(view.uptime_s)}"
    line = [(name, "bold"), (f"{about}  {state}", "")]
    if view.step is not None:
        line.append((f"   step {view.step:,}", "bold"))
        if view.percent is not None:
            line.append((f" of {view.total:,}  {view.percent} %", ""))
        if view.left_s is not None:
            line.append((f"  {duration(view.left_s)} left", ""))
    is_bad = view.is_stalled or any(rank.is_slow or rank.is_at_fault for rank in view.ranks)
    style = "red" if view.is_stalled else "yellow" if is_bad else "green"
    headline = [
        [("> " if not at else "  ", style), (text, style)]
        for at, text in enumerate(wrapped(view.headline, columns - 2)[:_MOST_OF_HEADLINE])
    ]
    rates, past = _rates(view, choices), _past(view)
    both = [f"{rates}  {past}"] if rates and past else [rates or past]
    if width(both[0]) > columns:
        both = [rates, past]
    return [line, *headline, *([(each, "")] for each in both if each)]


def ended(status: int, ended_s: float) -> str:
    """``"ended 12 min ago, exit 1"``."""
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    unit_s, unit = next((each for each in units if ended_s >= each[0]), (1, "s"))
    return f"ended {int(ended_s / unit_s)} {unit} ago, exit {status}"


def _past(view: JobView) -> str:
    parts = [f"trained {share(view.trained)}"] if view.trained is not None else []
    if view.losses or view.restarts:
        took = f" ({_time(view.recovery_s)})" if view.recovery_s else ""
        parts += [f"losses {view.losses}{took}", f"restarts {view.restarts}"]
    return "  ".join(parts)


def event_text(event: JobEvent) -> str:
    """``"18:01:12 rank 6 was killed by SIGKILL"``."""
    return f"{strftime('%H:%M:%S', localtime(event.at))} {event.text}"


def _latest_event(view: JobView | None) -> list[list[Piece]]:
    """The last one besides rounds, which other lines tell."""
    if view is None or view.status is not None:
        return []
    events = [each for each in view.events if each.kind != "round"]
    return [[(event_text(events[-1]), "")]] if events else []


def wrapped(text: str, columns: int) -> list[str]:
    """Its lines, broken between words where possible."""
    lines, line = [], ""
    for word in one_line(text).split(" "):
        longer = f"{line} {word}" if line else word
        if width(longer) <= columns:
            line = longer
            continue
        lines += [line] if line else []
        *whole, line = _parts(word, columns)
        lines += whole
    return [*lines, line]


def _rates(view: JobView, choices: Choices) -> str:
    parts = []
    bars = _sparkline(choices.speeds)
    if view.steps_per_s is not None:
        parts.append(f"steps/s {_number(view.steps_per_s)}{bars}")
        bars = ""
    if view.calls_per_s is not None:
        parts.append(f"calls/s {_number(view.calls_per_s)}{bars}")
    if view.bytes_per_s is not None:
        parts.append(f"{_bytes(view.bytes_per_s)}/s")
    parts += [f"{name} {value}" for name, value in view.values.items()]
    return "  ".join(parts)


def _sparkline(speeds: Sequence[float]) -> str:
    most = max(speeds, default=0.0)
    if most <= 0:
        return ""
    last = len(_BARS) - 1
    return " " + "".join(_BARS[min(last, round(each / most * last))] for each in speeds)


def _bottom(view: JobView | None, choices: Choices, columns: int) -> list[list[Piece]]:
    if choices.prompt:
        return [[(f"{choices.prompt}: {choices.typed}_", "chosen")]]
    parts = []
    if choices.page is None:
        parts += [f"sorted by {choices.sort}"] if choices.sort != "late" else []
        parts += [f"node {choices.node}"] if choices.node else []
        parts += [f"/{choices.text}"] if choices.text else []
    parts += ["paused"] if choices.is_paused else []
    if view is not None and view.age_s > OLD_S:
        parts.append(f"{int(view.age_s)} s old")
    told = "  ".join(parts)
    keys = "Escape back  arrows scroll  q quit" if choices.page else KEYS
    room = columns - width(told) - (2 if told else 0)
    shown = cut(keys, room)
    last = [(shown + " " * (columns - width(shown) - width(told)), "dim"), (told, "chosen")]
    return [[(choices.note, "bold")], last] if choices.note else [last]


def _parts(line: str, columns: int) -> list[str]:
    """A long line in pieces, each as wide as the screen."""
    line, parts = one_line(line), []
    while width(line) > columns and (head := _beginning(line, columns)):
        parts.append(head)
        line = line[len(head) :]
    return [*parts, line]


def _page(page: Page, first: int, columns: int, room: int) -> list[list[Piece]]:
    every = [part for line in page.lines for part in _parts(line, columns)]
    lines = every[first : first + room - 1]
    more = f" (lines {first + 1}-{first + len(lines)} of {len(every)})"
    title = page.title + (more if len(lines) < len(every) else "")
    return [[(title, "bold")], *([(line, "")] for line in lines)]


def _ranks(view: JobView, choices: Choices, columns: int, room: int) -> list[list[Piece]]:
    ranks = shown_ranks(view, choices)
    if len(ranks) <= MOST_IN_TABLE:
        return _table(ranks, view, choices, columns, room)
    letters = _letters(sorted(ranks, key=lambda rank: rank.rank), choices, columns)
    letters = letters[: max(0, room - _LEAST_WORST - 1)]
    worst = _table(ranks, view, choices, columns, min(room - len(letters), MOST_IN_TABLE))
    return [*letters, *worst]


def _letters(ranks: Sequence[RankView], choices: Choices, columns: int) -> list[list[Piece]]:
    """A letter for each rank, the nodes one after the other."""
    blocks: list[list[RankView]] = []
    for rank in ranks:
        last = blocks[-1] if blocks else []
        if not last or last[0].node_rank != rank.node_rank or len(last) == _RANKS_TOGETHER:
            blocks.append([])
        blocks[-1].append(rank)
    label = max(len(str(rank.rank)) for rank in ranks) + 1
    in_line = max(1, (columns - label) // (_RANKS_TOGETHER + 1))
    lines: list[list[Piece]] = [[(_LEGEND, "dim")]]
    for at in range(0, len(blocks), in_line):
        line = [(f"{blocks[at][0].rank:<{label}}", "dim")]
        for block in blocks[at : at + in_line]:
            line += [(_letter(rank), _style(rank, choices)) for rank in block]
            line.append((" " * (_RANKS_TOGETHER + 1 - len(block)), ""))
        lines.append(line)
    return lines


def _letter(rank: RankView) -> str:
    return "!" if rank.is_at_fault else "L" if rank.is_slow else _LETTERS[rank.state]


def _style(rank: RankView, choices: Choices) -> str:
    if rank.rank == choices.rank:
        return "chosen"
    if rank.is_at_fault or rank.is_slow:
        return "yellow" if rank.is_slow else "red"
    return _STYLES.get(rank.state, "")


def _table(
    ranks: Sequence[RankView], view: JobView, choices: Choices, columns: int, room: int
) -> list[list[Piece]]:
    shown = _columns(ranks, view, columns)
    widths = _widths(ranks, shown, columns)

    def row(cells: Sequence[str]) -> str:
        parts = []
        for column, cell, wide in zip(shown, cells, widths, strict=True):
            text = cut(one_line(cell), wide)
            pad = " " * (wide - width(text))
            parts.append(text + pad if column.is_left else pad + text)
        return " ".join(parts)

    first = min(choices.first, max(0, len(ranks) - (room - 1)))
    lines: list[list[Piece]] = [[("  " + row([column.head for column in shown]), "bold")]]
    for rank in ranks[first : first + room - 1]:
        mark = ">" if rank.rank == choices.rank else " "
        mark += "!" if rank.is_at_fault or rank.is_slow else " "
        text = mark + row([column.cell(rank) for column in shown])
        lines.append([(text, _style(rank, choices))])
    return lines


def _columns(ranks: Sequence[RankView], view: JobView, columns: int) -> list[_Column]:
    found = [
        _Column("RANK", lambda rank: str(rank.rank)),
        _Column("NODE", lambda rank: rank.host, is_left=True),
        _Column("STATE", lambda rank: rank.state.value, is_left=True),
        _Column("CALL", _call, _LEAST_CALL, is_left=True),
        _Column("   FOR", lambda rank: "" if rank.for_s is None else _time(rank.for_s)),
        _Column("WAITS", lambda rank: _percent(rank.waited)),
        _Column("  LATE", _late),
        _Column(" CPU", lambda rank: _percent(rank.cpu)),
        _Column("NOCORE", lambda rank: _percent(rank.no_core)),
        _Column("   MEM", lambda rank: _bytes(rank.rss_bytes) if rank.rss_bytes else ""),
        _Column("AT", _at, _LEAST_AT, is_left=True),
    ]
    if view.status is not None:
        end = _Column("END", lambda rank: rank.end, _LEAST_CALL, is_left=True)
        found = [column for column in found if column.head in ("RANK", "NODE")] + [end]
    if len(view.nodes) < 2:
        found = [column for column in found if column.head != "NODE"]
    for dropped in ("NOCORE", "MEM", "NODE", "CPU", "WAITS", "AT"):
        if sum(_widths(ranks, found, columns)) + len(found) + 1 <= columns:
            break
        found = [column for column in found if column.head.strip() != dropped]
    return found


_LEAST_CALL, _LEAST_AT, _MOST_NODE = 18, 14, 12


def _widths(ranks: Sequence[RankView], shown: Sequence[_Column], columns: int) -> list[int]:
    """What each column needs; the wide ones share what is left."""
    needed = [
        max([len(column.head), *(width(one_line(column.cell(rank))) for rank in ranks)])
        for column in shown
    ]
    needed = [
        min(_MOST_NODE, each) if column.head == "NODE" else each
        for column, each in zip(shown, needed, strict=True)
    ]
    left = columns - 1 - len(shown) - sum(needed)
    for at, column in reversed(list(enumerate(shown))):
        if column.least and left < 0:
            shrunk = max(min(column.least, needed[at]), needed[at] + left)
            left += needed[at] - shrunk
            needed[at] = shrunk
    return needed


def _searched(rank: RankView) -> str:
    return " ".join((rank.host, rank.state.value, _call(rank), rank.end, rank.at))


def _call(rank: RankView) -> str:
    """``all_reduce #17``, or ``after dp all_reduce #17``."""
    if rank.end:
        return rank.end
    if not rank.group:
        return ""
    group = "" if rank.group == "default group" else f"{rank.group} "
    number = "" if rank.number is None else f" #{rank.number}"
    return f"{'' if rank.is_in_call else 'after '}{group}{rank.operation or 'operation'}{number}"


def _at(rank: RankView) -> str:
    return rank.at.rpartition("/")[2]


def _late(rank: RankView) -> str:
    if rank.late_s is None:
        return ""
    return _time(rank.late_s) if rank.late_s >= 0.0005 else "0"


def _time(seconds: float) -> str:
    return duration(seconds).replace(" ", "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.0f}%"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            digits = 1 if count < 9.95 and unit != "B" else 0
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
