"""Lists of ranks in words, such as "ranks 0, 2-3": the same in every message."""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from collections.abc import Sequence


def name_ranks(ranks: Sequence[int]) -> str:
    """``"rank 3"``, ``"ranks 0-2, 5"``; `ranks` are sorted."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
