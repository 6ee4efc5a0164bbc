"""What users read in the same form everywhere: ranks, durations, text from elsewhere, tables."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 3"``, ``"ranks 0-2, 5"``; `ranks` are sorted."""
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks, ', ')}"


def rank_ranges(ranks: Sequence[int], separator: str) -> str:
    """``"0-2,5"``, with that separator."""
    runs = runs_of(ranks)
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def runs_of(numbers: Sequence[int]) -> list[list[int]]:
    """Sorted numbers in lists of those that follow each other: [0, 1, 2], [5]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


_LEAST_S = 0.9995  # less rounds to fewer than 1000 ms


def brief(duration_s: float) -> str:
    """``3.2 s``, or ``340 ms`` below a second."""
    return f"{duration_s:.1f} s" if duration_s >= _LEAST_S else f"{duration_s * 1000:.0f} ms"


def printable(text: str, kept: str = "\n\t") -> str:
    """The text with its control characters spelled out, except for `kept`.

    A job's name, a host's, a path or an exception's message may contain sequences that a terminal
    obeys, characters that reorder a line, or bytes that cannot be printed at all.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in kept else each.encode("unicode_escape").decode()
        for each in text
    )


def how_ended(code: int | None, signal: str) -> str:
    """``"killed by SIGKILL"``, ``"ended with 1"``."""
    return f"killed by {signal}" if signal else f"ended with {code}"


def one_line(text: str) -> str:
    """The text as a single line."""
    return printable(text, kept="")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """The lines of a table, with two spaces between columns.

    Control characters in cells are spelled out.

    Args:
        right: the letter r at each right-aligned column, e.g. ``"r r"``.
    """
    shown = [[one_line(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in shown) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if right[i : i + 1] == "r" else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(row) for row in shown]
