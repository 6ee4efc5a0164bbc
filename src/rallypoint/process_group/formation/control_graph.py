"""Who has a control connection with whom, in a group of so many hosts that not each has with each.

Rank r is connected with r - d and r + d for each power of two d, around the circle of ranks: with
15 others of 256, with 19 of 1,024. What one of them hears of a death, it passes on once. Every
other rank hears of it after a few steps (at most 4 of 256, 5 of 1,024), and from several sides, so
that a few more deaths keep nobody from hearing. On which hosts the ranks are does not matter.
"""

from __future__ import annotations


def neighbours(rank: int, ranks: int) -> list[int]:
    """The ranks that this one has a control connection with from the start, in order."""
    found = set()
    distance = 1
    while distance < ranks:
        found |= {(rank + distance) % ranks, (rank - distance) % ranks}
        distance *= 2
    return sorted(found - {rank})
