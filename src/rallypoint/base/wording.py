"""What messages name in the same words everywhere: ranks, durations, text from elsewhere."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 3"``, ``"ranks 0-2, 5"``; `ranks` are sorted."""
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_ranges(ranks, ', ')}"


def rank_ranges(ranks: Sequence[int], separator: str) -> str:
    """``"0-2,5"``, with that separator."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


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


def one_line(text: str) -> str:
    """The text as a single line."""
    return printable(text, kept="")
