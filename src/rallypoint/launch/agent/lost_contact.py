"""Which ranks are to end because some cannot reach each other, though nobody was lost. Pure.

A network that was silent for some seconds breaks connections that nothing repairs, so at first all
form a new group. If they cannot, ranks complain of those to which they have tried to connect, or of
rank 0 if it is the store at its host. It is hosts that cannot reach each other; the fewer without
which nobody complains, the better:

    host A complains of B, and B of A, but C of neither: without B, the others can go on
    B and C complain of A: without A

At fault are those ranks of such a host that complain, or of which others do: the path to the others
may be in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from rallypoint.launch.agent.call_timeouts import GRACE_S


class LostContacts:
    """The complaints of one round.

    Attributes:
        judge_at: when all have had the time to report; None: nobody has reported, or it is over.
    """

    def __init__(self, world_size: int) -> None:
        self.judge_at: float | None = None
        self._world = range(world_size)
        self._pairs: set[tuple[int, int]] = set()
        self._is_judged = False

    def report(self, rank: int, culprit: int, now: float, *, had_formed: bool) -> None:
        """That rank cannot reach `culprit` (-1: it does not know whom).

        `had_formed`: it could when this round began.
        """
        if self._is_judged:
            return
        is_known = rank in self._world and culprit in self._world
        if is_known and not had_formed and culprit != rank:
            self._pairs.add((rank, culprit))
        if self.judge_at is None:
            self.judge_at = now + GRACE_S

    def judge(self, node_of: Callable[[int], int]) -> list[int]:
        """Who is at fault; nobody: all shall try again.

        Args:
            node_of: the number of a rank's host.
        """
        self.judge_at, self._is_judged = None, True
        nodes = _without_whom({(node_of(a), node_of(b)) for a, b in self._pairs})
        apart = [pair for pair in self._pairs if node_of(pair[0]) != node_of(pair[1])]
        at_fault = {rank for pair in apart for rank in pair if node_of(rank) in nodes}
        together = self._pairs.difference(apart)
        return sorted(
            at_fault | _without_whom(each for each in together if at_fault.isdisjoint(each))
        )


def _without_whom(pairs: Iterable[tuple[int, int]]) -> set[int]:
    """Members of all of these pairs, as few as are found by taking the most frequent first."""
    left = {(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}
    found = set[int]()
    while left:
        often = Counter(each for pair in left for each in pair)
        worst = max(often, key=lambda each: (often[each], each))
        found.add(worst)
        left = {pair for pair in left if worst not in pair}
    return found
