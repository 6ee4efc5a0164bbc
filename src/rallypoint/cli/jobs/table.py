"""Plain-text tables, no wider than necessary."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.wording import one_line


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """The lines of a table, with two spaces between columns; the last column is not padded.

    Control characters in cells are spelled out.

    Args:
        right: the letter r at each right-aligned column, e.g. ``"r r"``.
    """
    shown = [[one_line(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]
    return [_line(row, widths, right) for row in shown]


def _line(row: Sequence[str], widths: Sequence[int], right: str) -> str:
    cells = [
        cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()
