"""Which ranks are to end because calls timed out as they did not come. Pure.

Workers that can go on without others report whom they have waited for. That rank may have waited
for another one in its turn, so what counts in the end is who reports nothing:

    rank 0 --waits for--> rank 1 --waits for--> rank 2, which is stopped
    0 and 1 report that they waited for 1; 2 reports nothing, and is at fault
"""

from __future__ import annotations

from collections.abc import Collection

# All ranks of a group learn of a timeout within milliseconds; they need the processor to say so.
GRACE_S = 1.0


class TimedOutCalls:
    """The timeouts of one round.

    Attributes:
        judge_at: when all have had the time to report; None: nobody has reported, or it is over.
    """

    def __init__(self, world_size: int) -> None:
        self.judge_at: float | None = None
        self._world = range(world_size)
        self._reporting: set[int] = set()
        self._culprits: set[int] = set()
        self._members: set[int] = set()
        self._is_judged = False

    def report(self, rank: int, culprit: int, members: Collection[int], now: float) -> None:
        """A call of that rank timed out as it waited for `culprit`.

        `members` are the ranks of the call; empty: all.
        """
        if self._is_judged:
            return
        self._reporting.add(rank)
        self._culprits.add(culprit)
        self._members.update(members or self._world)
        if self.judge_at is None:
            self.judge_at = now + GRACE_S

    def judge(self) -> list[int]:
        """Who is at fault; nobody: all take part by now."""
        self.judge_at, self._is_judged = None, True
        silent = self._members.intersection(self._world) - self._reporting
        return sorted(silent & self._culprits or silent)
