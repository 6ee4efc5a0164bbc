"""How ranks wait for others of their host: by the cores that each may use.

A rank that holds a core alone gains nothing by giving it away. One that may share it must, or its
peer never runs. Reasons and figures are in docs/decisions/003-waiting.md.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum


class Room(IntEnum):
    """What a rank's cores are to it."""

    CROWDED = 0  # there are fewer cores than ranks
    ENOUGH = 1  # there is one for each, and the kernel says who has which
    OWN = 2  # they are no other rank's

    @property
    def spins(self) -> int:
        """How often to look before anything else; a look takes some 12 ns."""
        return (0, 50, 10_000)[self]

    @property
    def yields(self) -> int:
        """How often to yield the core then, before sleeping."""
        return (1000, 1000, 0)[self]


def own_cores() -> str:
    """The cores that this thread may use, as the hexadecimal digits of a mask."""
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def rooms(hosts: Sequence[int], cores: Sequence[str]) -> list[Room]:
    """By rank, from each rank's host and what `own_cores` says there."""
    masks = [int(digits, 16) for digits in cores]
    by_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    found = [Room.CROWDED] * len(hosts)
    for ranks in by_host.values():
        once = twice = 0  # the cores of one rank at least, and of more than one
        for rank in ranks:
            twice |= once & masks[rank]
            once |= masks[rank]
        for rank in ranks:
            if once.bit_count() >= len(ranks):
                found[rank] = Room.ENOUGH if len(ranks) == 1 or masks[rank] & twice else Room.OWN
    return found
