"""Which ranks are to end because some cannot reach each other, though nobody was lost. Pure.

A network that was silent for some seconds breaks connections that nothing repairs, so at first all
form a new group. If they cannot, ranks complain of each other, or of rank 0 if it is the store at
its host that they cannot reach. The fewer ranks without which nobody complains, the better:

    0 complains of 1, and 1 of 0, but 2 of neither: without 1, the others can go on
    1 and 2 complain of 0: without 0
"""

from __future__ import annotations

from collections import Counter

from rallypoint.launch.agent.timeouts import GRACE_S


class LostContacts:
    """The complaints of one round.

    Attributes:
        judge_at: when all have had the time to report; None: nobody has reported, or it is over.
    """

    def __init__(self) -> None:
        self.judge_at: float | None = None
        self._pairs: set[tuple[int, int]] = set()
        self._is_judged = False

    def report(self, rank: int, culprit: int, now: float, *, had_formed: bool) -> None:
        """That rank cannot reach `culprit` (-1: it does not know whom).

        `had_formed`: it could when this round began.
        """
        if self._is_judged:
            return
        if not had_formed and culprit not in (-1, rank):
            self._pairs.add((min(rank, culprit), max(rank, culprit)))
        if self.judge_at is None:
            self.judge_at = now + GRACE_S

    def judge(self) -> list[int]:
        """Who is at fault; nobody: all shall try again."""
        self.judge_at, self._is_judged = None, True
        pairs, at_fault = set(self._pairs), list[int]()
        while pairs:
            complaints = Counter(rank for pair in pairs for rank in pair)
            worst = max(complaints, key=lambda rank: (complaints[rank], rank))
            at_fault.append(worst)
            pairs = {pair for pair in pairs if worst not in pair}
        return sorted(at_fault)
