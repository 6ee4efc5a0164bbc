"""What ranks that meet again conclude: whether an update happened, and who has the state. Pure.

Each rank has *prepared* an update when it enters the agreement on it, and *committed* it when that
has succeeded, which takes every rank. So if anybody, also one that is lost since, has committed an
update, all ranks have prepared it, and none can have gone further than one:

    some survivor has committed it              the others commit it, too
    none has, but all have prepared it          they commit it: one that is lost may have
    a survivor has not prepared it              nobody can have committed it: it is begun again
    they have prepared it in different rounds   as before; and it is not the same update

The last can happen where ranks are idle: others may prepare an update in a new round, with other
gradients, before a rank that is idle there has learned how the round before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RankReport(NamedTuple):
    """What a rank tells the others when they meet again.

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
        committed: the update up to which everybody's state is.
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
    """The conclusion, the same on all ranks. If nobody has the state, rank 0's is taken."""
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
