"""What ranks conclude after a loss: whether an update happened, and which rank has which part of
the state. Pure.

Each rank has *prepared* an update when it enters the agreement on it, and *committed* it when that
has succeeded, which takes every rank. So if any rank has committed an update, even one that was
lost since, all ranks have prepared it, and none can have gone further than one update:

    some survivor has committed it              the others commit it, too
    none has, but all have prepared it          they commit it: one that is lost may have
    a survivor has not prepared it              no rank can have committed it: it is retried
    they have prepared it in different rounds   as before; and it is not the same update

The last can happen where ranks are idle: others may prepare an update in a new round, with other
gradients, before a rank that is idle there has learned how the round before ended.

All this needs survivors that were in the last round that formed. One that had missed it might have
prepared another update of the same number, which its report would not show. So launchers end
workers that others have continued without, and give them no rank (rendezvous/job/round_state.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

NO_SHARD = -1


class RankReport(NamedTuple):
    """What a rank reports to the others when they rendezvous again.

    Attributes:
        is_member: it has the state; a newcomer has not, nor has an idle rank of `Replicas`.
        committed, prepared: the number of the last update that it has. One that has no state has
            prepared an update if others have made any, or it has begun to receive theirs.
        saves: it keeps a copy of the state, to which it returns after a loss.
        prepared_in: the round in which it prepared the last one.
    """

    is_member: bool
    committed: int
    prepared: int
    saves: bool = False
    prepared_in: int = -1


@dataclass(frozen=True, slots=True)
class Settlement:
    """What all ranks conclude.

    Attributes:
        committed: the update up to which the state of all ranks is.
        sources: the ranks that have the state.
        newcomers: those that need it.
        saves: they keep a copy of it, too.
    """

    committed: int
    sources: tuple[int, ...]
    newcomers: tuple[int, ...]
    saves: bool = False

    def among(self, ranks: Sequence[int]) -> Settlement:
        """Of these ranks alone, which hold one shard of the state."""
        sources = tuple(rank for rank in self.sources if rank in ranks) or tuple(ranks[:1])
        newcomers = tuple(rank for rank in ranks if rank not in sources)
        return Settlement(self.committed, sources, newcomers, self.saves)


def settle(reports: Sequence[RankReport]) -> Settlement:
    """The conclusion, the same on all ranks. If no rank has the state, rank 0's is taken."""
    sources = tuple(rank for rank, each in enumerate(reports) if each.is_member)
    if not sources:
        return Settlement(0, (0,), tuple(range(1, len(reports))))
    committed = max(reports[rank].committed for rank in sources)
    have_prepared = all(reports[rank].prepared > committed for rank in sources)
    if have_prepared and len({reports[rank].prepared_in for rank in sources}) == 1:
        committed += 1
    newcomers = tuple(rank for rank, each in enumerate(reports) if not each.is_member)
    saves = any(reports[rank].saves for rank in sources)
    return Settlement(committed, sources, newcomers, saves)


class Holding(NamedTuple):
    """What a rank brings to a round.

    A rank that has a shard keeps it for life. The others take what is needed most. As many replicas
    are formed as there are ranks for the scarcest shard; ranks that are left over are idle.

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
        lost: shards whose state no rank has, although other shards have theirs.
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


class Position(NamedTuple):
    """Where a rank is among those that train.

    Attributes:
        rank, size: its number among them, and how many they are; -1 for an idle rank.
        replica, replicas: its replica's number, and how many there are.
    """

    rank: int
    size: int
    replica: int
    replicas: int
