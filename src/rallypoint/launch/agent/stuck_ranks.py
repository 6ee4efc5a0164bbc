"""What an agent does when its workers report that a rank keeps them waiting.

The agent itself complains of workers that a signal has stopped, and of those that have raised an
exception and do not end: they cannot just be computing.

The agent that coordinates hears of all complaints (complaint_watch.py, imported with the first),
and has a rank killed by its own agent if others can go on without it.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable

from rallypoint.base.control_message import CallTimedOut, LongWait, LostContact
from rallypoint.launch.agent.local_workers import LocalWorkers
from rallypoint.launch.agent.node import EndElsewhere, NodeDecision, NodeState
from rallypoint.launch.job import Job, OnHang
from rallypoint.launch.output.progress import ProgressReporter
from rallypoint.launch.rounds.source import RoundSource

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.launch.agent.agent_messages import AgentMessage
    from rallypoint.launch.agent.complaint_watch import ComplaintWatch


class _Suspect:
    """A worker that keeps others waiting, as far as its agent knows.

    Attributes:
        is_stopped: a signal has stopped it; otherwise it has raised an exception, and not ended.
    """

    def __init__(
        self, round_number: int, since: float, after_s: float, *, is_stopped: bool
    ) -> None:
        self.round, self.since, self.complains_at = round_number, since, since + after_s
        self.is_stopped = is_stopped


class StuckRanks:
    """One agent's part.

    Args:
        perform: performs the decisions of `state`.
        look: inspects the workers before they are ended.
    """

    def __init__(
        self,
        job: Job,
        selector: selectors.BaseSelector,
        rounds: RoundSource,
        state: NodeState,
        workers: LocalWorkers,
        progress: ProgressReporter,
        *,
        perform: Callable[[NodeDecision], None],
        look: Callable[[], None],
    ) -> None:
        self._job, self._selector, self._rounds = job, selector, rounds
        self._state, self._workers, self._progress = state, workers, progress
        self._perform, self._look = perform, look
        self._watch: ComplaintWatch | None = None  # once a worker has complained
        self._suspects: dict[int, _Suspect] = {}  # by rank

    @property
    def wake_at(self) -> float | None:
        """When to call `tick`; None: only events matter."""
        alarms = [each.complains_at for each in self._suspects.values()]
        if self._watch is not None and self._watch.wake_at is not None:
            alarms.append(self._watch.wake_at)
        return min(alarms, default=None)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._watch is not None:
            self._watch.tick(now)
        for rank, suspect in list(self._suspects.items()):
            if rank not in self._state.group.running or suspect.round != self._state.round:
                del self._suspects[rank]
            elif now >= suspect.complains_at:
                since_s, is_stopped = now - suspect.since, suspect.is_stopped
                self._watching().waits(rank, since_s, is_stopped=is_stopped)
                suspect.complains_at = now + since_s

    def close(self) -> None:
        """Stop watching."""
        if self._watch is not None:
            self._watch.close()

    def complains(self, rank: int, message: LongWait | CallTimedOut | LostContact) -> None:
        """A worker of this node has waited for long, or cannot go on with another one."""
        waits = isinstance(message, LongWait)
        if (waits and self._job.on_hang is not OnHang.OFF) or (
            not waits and self._rounds.keeps_survivors
        ):
            self._watching().complains(rank, message)

    def stopped(self, rank: int, now: float) -> None:
        """A signal has stopped a worker of this node."""
        if self._job.on_hang is not OnHang.OFF and rank >= 0:
            from rallypoint.launch.agent.complaints import STOPPED_SHARE

            after_s = STOPPED_SHARE * self._job.hang_after_s
            self._suspects[rank] = _Suspect(self._state.round, now, after_s, is_stopped=True)

    def raised(self, rank: int, now: float) -> None:
        """A worker of this node reports the exception that ends it, and may not end."""
        if self._job.on_hang is not OnHang.OFF and rank >= 0:
            after_s = self._job.hang_after_s
            self._suspects[rank] = _Suspect(self._state.round, now, after_s, is_stopped=False)

    def continued(self, rank: int, now: float) -> None:
        """A signal has let it continue."""
        suspect = self._suspects.get(rank)
        if suspect is None or not suspect.is_stopped:
            return
        del self._suspects[rank]
        if self._watch is not None:
            self._watch.waits(rank, now - suspect.since, is_over=True, is_stopped=True)

    def told(self, told: AgentMessage) -> None:
        """Another agent says something of workers."""
        from rallypoint.launch.agent.agent_messages import EndRank

        if isinstance(told, EndRank):
            self._perform(self._state.end_rank(told.rank, told.round, told.because))
        else:
            self._watching().heard(told)

    def end_elsewhere(self, action: EndElsewhere) -> None:
        """Have another agent kill one of its ranks."""
        from rallypoint.launch.agent.agent_messages import EndRank, have_rank_ended

        have_rank_ended(self._rounds, EndRank(action.round, action.rank, action.because))

    def _watching(self) -> ComplaintWatch:
        if self._watch is None:
            from rallypoint.launch.agent.complaint_watch import ComplaintWatch

            self._watch = ComplaintWatch(
                self._job,
                self._selector,
                self._rounds,
                self._state,
                self._workers,
                self._progress,
                perform=self._perform,
                look=self._look,
            )
        return self._watch
