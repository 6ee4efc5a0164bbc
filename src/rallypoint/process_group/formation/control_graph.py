"""Which ranks have control connections, in a group of so many hosts that not every pair has one.

Rank r is connected with r - d and r + d for each power of two d, modulo the number of ranks: with
15 others of 256, with 19 of 1,024. Each rank passes on the news of a death once. It reaches every
other rank after a few steps (at most 4 of 256, 5 of 1,024), and by several paths, so that a few
more deaths do not stop it. The placement of ranks on hosts does not matter.
"""

from __future__ import annotations


def neighbours(rank: int, ranks: int) -> list[int]:
    """The ranks to which this one has a control connection from the start, in order."""
    found = set()
    distance = 1
    while distance < ranks:
        found |= {(rank + distance) % ranks, (rank - distance) % ranks}
        distance *= 2
    return sorted(found - {rank})
