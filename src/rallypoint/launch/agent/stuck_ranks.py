"""What an agent does when its workers report that a rank keeps them waiting.

The agent itself complains of workers that a signal has stopped, and of those that have raised an
exception and do not end: they cannot just be computing.

The agent that coordinates hears of all complaints (complaint_watch.py, imported with the first),
and has a rank killed by its own agent if others can continue without it.
"""

from __future__ import annotations

from rallypoint.base.control_message import CallTimedOut, LongWait, LostContact
from rallypoint.base.ready import earliest
from rallypoint.launch.agent.local_workers import AgentParts
from rallypoint.launch.agent.node import EndElsewhere
from rallypoint.launch.job import OnHang

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.launch.agent.complaint_watch import ComplaintWatch
    from rallypoint.launch.agent.complaints import AgentMessage


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
    """One agent's part."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._job, self._rounds, self._state = parts.job, parts.rounds, parts.state
        self._watch: ComplaintWatch | None = None  # once a worker has complained
        self._suspects: dict[int, _Suspect] = {}  # by rank

    @property
    def wake_at(self) -> float | None:
        """When to call `tick`; None: only events matter."""
        complaints = [each.complains_at for each in self._suspects.values()]
        return earliest(*complaints, None if self._watch is None else self._watch.wake_at)

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
        """A worker of this node has waited for long, or cannot continue with another one."""
        waits = isinstance(message, LongWait)
        if (waits and self._job.on_hang is not OnHang.OFF) or (
            not waits and self._rounds.keeps_survivors
        ):
            self._watching().complains(rank, message)
        elif isinstance(message, LostContact) and message.round == self._state.round:
            # Workers that are not kept must not wait: their round is over with its first loss.
            self._parts.perform(self._state.contact_lost(()))

    def stopped(self, rank: int, now: float) -> None:
        """A signal has stopped a worker of this node."""
        if self._job.on_hang is not OnHang.OFF and rank >= 0:
            from rallypoint.launch.agent.complaints import STOPPED_SHARE

            after_s = STOPPED_SHARE * self._job.least_hang_s
            self._suspects[rank] = _Suspect(self._state.round, now, after_s, is_stopped=True)

    def raised(self, rank: int, now: float) -> None:
        """A worker of this node reports the exception that ends it, and may not end."""
        if self._job.on_hang is not OnHang.OFF and rank >= 0:
            after_s = self._job.least_hang_s
            self._suspects[rank] = _Suspect(self._state.round, now, after_s, is_stopped=False)

    def continued(self, rank: int, now: float) -> None:
        """A signal has let it continue."""
        suspect = self._suspects.get(rank)
        if suspect is None or not suspect.is_stopped:
            return
        del self._suspects[rank]
        if self._watch is not None:
            self._watch.waits(rank, now - suspect.since, is_over=True, is_stopped=True)

    def reported(self, message: AgentMessage) -> None:
        """Another agent reports something of workers."""
        from rallypoint.launch.agent.complaints import EndRank

        if isinstance(message, EndRank):
            self._parts.perform(self._state.end_rank(message.rank, message.round, message.because))
        else:
            self._watching().heard(message)

    def end_elsewhere(self, action: EndElsewhere) -> None:
        """If this agent coordinates, order all others, one of which has that rank, to kill it."""
        from rallypoint.launch.agent.complaints import EndRank
        from rallypoint.rendezvous.transport.codec import encode

        roster = self._rounds.roster()
        if roster is None or roster.leader != roster.me:
            return
        order = encode(EndRank(action.round, action.rank, action.because))
        for each in roster.members:
            if each.key != roster.me:
                self._rounds.inquire(each.key, order)

    def _watching(self) -> ComplaintWatch:
        if self._watch is None:
            from rallypoint.launch.agent.complaint_watch import ComplaintWatch

            self._watch = ComplaintWatch(self._parts)
        return self._watch
