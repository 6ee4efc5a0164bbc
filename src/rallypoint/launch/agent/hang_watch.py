"""Has the job inspected when one of its workers reports a long wait, or is stopped by a signal.

    worker --"wait"--> agent --"wait"--> the agent that coordinates --> a process that inspects

Imported only then. The coordinating agent does this for all nodes, so there is one line and one
decision. Its failures are ignored, because they must not disturb the job.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from contextlib import suppress

from rallypoint.launch.agent.agent_messages import LongWaits
from rallypoint.launch.agent.hangs import STOPPED_SHARE, Hang, Hangs
from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.inspection.child import Child
from rallypoint.launch.rounds.source import RoundSource

_BETWEEN_STOPPED_S = 0.03  # the two looks: that it does not move, its agent has seen
_CALM = 0.5  # of the time until a wait is long: it is not looked at more often


class HangWatch:
    """The watch of one agent.

    Args:
        after_s: shorter waits are ignored.
        hangs: called once when a hang has been found.
        goes_on: called when that hang is over with a rank, for how long it waited, and whether it
            was stopped instead.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        rounds: RoundSource,
        state: NodeState,
        *,
        after_s: float,
        hangs: Callable[[Hang], None],
        goes_on: Callable[[int, float, bool], None],
    ) -> None:
        self._selector = selector
        self._rounds, self._state = rounds, state
        self._after_s = after_s
        self._tell_hang, self._tell_end = hangs, goes_on
        self._round = -1
        self._hangs = Hangs(after_s)
        self._child: Child | None = None
        self._calm_s = self._calm_until = 0.0

    def complains(
        self, rank: int, seconds: float, *, is_over: bool = False, is_stopped: bool = False
    ) -> None:
        """A worker of this node has waited this long, and still waits unless it `is_over`.

        With `is_stopped`, it has been stopped by a signal for so long.
        """
        waits = LongWaits(self._state.round, rank, seconds, is_over, is_stopped)
        with suppress(Exception):
            roster = self._rounds.roster()
            if roster is not None and roster.leader not in ("", roster.me):
                self._rounds.inquire(roster.leader, waits.to_bytes())
            else:
                self._take(waits)

    def heard(self, waits: LongWaits) -> None:
        """The same for a worker of another node."""
        with suppress(Exception):
            if waits.round == self._state.round:
                self._take(waits)

    def close(self) -> None:
        """Stop watching."""
        if self._child is not None:
            self._child.close()

    def _take(self, waits: LongWaits) -> None:
        if self._round != self._state.round:
            self._round, self._hangs = self._state.round, Hangs(self._after_s)
            self._calm_until = 0.0
        if waits.is_over:
            if self._hangs.goes_on(waits.rank, was_stopped=waits.is_stopped):
                self._tell_end(waits.rank, waits.seconds, waits.is_stopped)
            return
        self._hangs.complains(waits.rank)
        if self._child is None and time.monotonic() >= self._calm_until:
            self._calm_s = _CALM * self._after_s * (STOPPED_SHARE if waits.is_stopped else 1.0)
            between = [str(_BETWEEN_STOPPED_S)] if waits.is_stopped else []
            self._child = Child(self._selector, ["job", str(os.getpid()), *between], self._seen)

    def _seen(self, explanation: dict[str, object] | None) -> None:
        self._child = None
        self._calm_until = time.monotonic() + self._calm_s
        # Meanwhile the workers may have ended, or be others.
        is_current = self._round == self._state.round and self._state.is_under_way
        if explanation is None or not is_current or explanation.get("round") != self._round:
            return
        with suppress(Exception):
            hang = self._hangs.judge(explanation)
            if hang is not None:
                self._tell_hang(hang)
