"""Has the job looked at when one of its workers complains of a long wait; imported only then.

    worker --"wait"--> agent --"wait"--> the agent that coordinates --> a process that looks

So that there is one line, and one decision, the agent that coordinates sees to it for all nodes. A
failure here must not disturb the job: it is left out.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from contextlib import suppress

from rallypoint.launch.agent.hangs import Hang, Hangs
from rallypoint.launch.agent.node import NodeState, Phase
from rallypoint.launch.inspection.child import Child
from rallypoint.launch.inspection.relay import LongWaits
from rallypoint.launch.rounds.source import RoundSource

_CALM = 0.5  # of the time until a wait is long: it is not looked at more often


class HangWatch:
    """One agent's.

    Args:
        after_s: waits that are shorter are none.
        hangs: called when a hang has been found, once.
        goes_on: called with a rank, and for how long it had waited, when that hang is over.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        rounds: RoundSource,
        state: NodeState,
        *,
        after_s: float,
        hangs: Callable[[Hang], None],
        goes_on: Callable[[int, float], None],
    ) -> None:
        self._selector = selector
        self._rounds, self._state = rounds, state
        self._after_s = after_s
        self._tell_hang, self._tell_end = hangs, goes_on
        self._round = -1
        self._hangs = Hangs(after_s)
        self._child: Child | None = None
        self._calm_until = 0.0

    def complains(self, rank: int, seconds: float, *, is_over: bool) -> None:
        """A worker of this node has waited for so long, and does still unless it `is_over`."""
        with suppress(Exception):
            roster = self._rounds.roster()
            if roster is not None and roster.leader not in ("", roster.me):
                waits = LongWaits(self._state.round, rank, seconds, is_over)
                self._rounds.inquire(roster.leader, waits.to_bytes())
            else:
                self._take(rank, seconds, is_over=is_over)

    def heard(self, waits: LongWaits) -> None:
        """The same of a worker of another node."""
        with suppress(Exception):
            if waits.round == self._state.round:
                self._take(waits.rank, waits.seconds, is_over=waits.is_over)

    def close(self) -> None:
        """Look no more."""
        if self._child is not None:
            self._child.close()

    def _take(self, rank: int, seconds: float, *, is_over: bool) -> None:
        if self._round != self._state.round:
            self._round, self._hangs = self._state.round, Hangs(self._after_s)
            self._calm_until = 0.0
        if is_over:
            if self._hangs.goes_on(rank):
                self._tell_end(rank, seconds)
            return
        self._hangs.complains(rank)
        if self._child is None and time.monotonic() >= self._calm_until:
            self._child = Child(self._selector, ["job", str(os.getpid())], self._seen)

    def _seen(self, verdict: dict[str, object] | None) -> None:
        self._child = None
        self._calm_until = time.monotonic() + _CALM * self._after_s
        # Meanwhile the workers may have ended, or be others.
        is_current = self._round == self._state.round and self._state.phase is Phase.RUNNING
        if verdict is None or not is_current or verdict.get("round") != self._round:
            return
        with suppress(Exception):
            hang = self._hangs.judge(verdict)
            if hang is not None:
                self._tell_hang(hang)
