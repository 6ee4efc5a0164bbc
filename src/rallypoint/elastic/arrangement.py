"""Which rank holds which shard, and which ranks train together as a replica. Pure.

A rank that has a shard keeps it for life. The others take what is needed most. As many replicas
are formed as there are ranks for the scarcest shard; ranks that are left over are idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

NO_SHARD = -1


class Holding(NamedTuple):
    """What a rank brings to a round.

    Attributes:
        shard: the one that it was given in an earlier round; NO_SHARD for a newcomer.
        has_state: and it has the state of the last update.
    """

    shard: int
    has_state: bool


class Arrangement(NamedTuple):
    """What all ranks conclude.

    Attributes:
        shards: of each rank.
        replicas: for each, the ranks that hold shards 0, 1, ...
        lost: shards of which nobody has the state, although others have theirs.
    """

    shards: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    lost: tuple[int, ...]


def arrange(holdings: Sequence[Holding], count: int) -> Arrangement:
    """The arrangement of these ranks in replicas of `count` shards, the same on all ranks.

    At the start, rank r holds shard r % count. A rank that takes the number of a lost one takes its
    shard and its place in a replica as well.
    """
    shards = [each.shard for each in holdings]
    held = Counter(shards)
    newcomers = [rank for rank, shard in enumerate(shards) if shard == NO_SHARD]
    for rank in newcomers:
        shard = rank % count  # as at the start, unless enough have it
        if held[shard] < len(holdings) // count:
            shards[rank] = shard
            held[shard] += 1
    for rank in newcomers:
        if shards[rank] == NO_SHARD:
            shards[rank] = min(range(count), key=lambda each: held[each])
            held[shards[rank]] += 1
    number = min(held[shard] for shard in range(count))
    columns = []
    for shard in range(count):
        holders = [rank for rank, each in enumerate(shards) if each == shard]
        holders.sort(key=lambda rank: not holdings[rank].has_state)  # they come first
        columns.append(sorted(holders[:number]))
    present = {shards[rank] for rank, each in enumerate(holdings) if each.has_state}
    lost = tuple(shard for shard in range(count) if present and shard not in present)
    return Arrangement(tuple(shards), tuple(zip(*columns, strict=True)), lost)
