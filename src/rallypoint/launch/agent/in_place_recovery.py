"""The agent's part in in-place recovery: what it does for the survivors, and what it reports to
users.

node.py decides which workers continue, local_workers.py assigns their places; control_link.py is
the workers' side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from rallypoint.base.control_message import Released, Stage, WorkerReport
from rallypoint.base.ready import earliest
from rallypoint.base.wording import brief, name_ranks
from rallypoint.base.worker_hook import is_without_rank
from rallypoint.launch.agent.guardian import GuardianReport
from rallypoint.launch.agent.local_workers import ANSWER_S, COME_S, AgentParts, Worker
from rallypoint.launch.agent.node import SIGKILL, NodeDecision, Phase, SignalWorkers
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup
from rallypoint.rendezvous.job.reports import Start

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # before another worker is put on standby
# A start takes cores from the survivors, so it waits until they have continued, but not longer than
# this.
_GO_ON_S = 0.05
_NEEDS_ELASTIC = (
    "the script uses PyTorch's process groups, but workers on standby (--spares) need a script that"
    " uses rallypoint.elastic"
)
_NO_RANK = "it has no RANK before that call, so the script must not read RANK earlier"


class InPlaceRecovery:
    """One node's workers on their way from round to round.

    Args:
        stand_by: starts what is missing on standby.
    """

    def __init__(self, parts: AgentParts, *, stand_by: Callable[[], None]) -> None:
        self._keeps = parts.rounds.keeps_survivors
        # So many workers in a row may end on standby before they are ready, and others are started
        # for them.
        self._restarts, self._fruitless = parts.job.max_restarts, 0
        self._stand_by_at: float | None = None
        self._lets_go_on = False  # no worker is put on standby before the survivors have continued
        self._state, self._workers, self._progress = parts.state, parts.workers, parts.progress
        self._perform, self._stand_by = parts.perform, stand_by
        self._recovery: Recovery | None = None  # until all surviving workers run in the next round
        self._recoveries = Recoveries()
        self._is_prepared = False
        self._lost_standbys: list[WorkerExit] = []  # in this round
        self.began_s = 0.0  # when workers continued (time.time()); 0: all are new

    @property
    def wake_at(self) -> float | None:
        """When to call `tick`."""
        comings = [worker.come_by for worker in self._workers.standbys]
        return earliest(self._workers.wake_at, self._stand_by_at, *comings)

    def begin(self, start: Start) -> None:
        """A round begins in which workers of this node continue, or whose workers are on
        standby.
        """
        seat, over, now = start.seat, self._state.group, time.monotonic()
        elsewhere, known_at = self._state.stopped_because, self._state.broken_at
        kept = [self._workers.by_rank[rank] for rank in sorted(self._state.survivors)]
        gone = [*self._state.lost_while_kept, *reversed(self._lost_standbys)]
        self._lost_standbys.clear()
        self.began_s = time.time()
        places = self._workers.places_for(seat, kept)
        size_before = self._workers.world_size
        ranks = seat.ranks
        local_ranks = {place.rank: place.local_rank for place, _ in places}
        newcomers = [place.rank for place, worker in places if worker not in kept]
        decision = self._state.started(
            seat.number,
            ranks,
            seat.node_rank,
            local_ranks=dict.fromkeys(ranks, 0) | local_ranks,
            elastic=[place.rank for place, worker in places if worker.report.is_elastic],
            newcomers=newcomers,
        )
        self._perform(decision)
        self._progress.round_began(seat, start.because)
        self._workers.go_on(seat, places, is_urgent=start.is_urgent, now=now)
        self._recovery = Recovery(
            over,
            elsewhere,
            start,
            size_before=size_before,
            newcomers=len(newcomers),
            known_at=known_at,
            now=now,
            before=self._recovery,
        )
        self.count_ready()
        if start.may_replace or not seat.local_world_size:  # all may have ended while they waited
            self._stand_by_at, self._lets_go_on = now + _GO_ON_S, True
        missing = ranks[len(places) :]  # lost while the round was being agreed
        if len(gone) < len(missing):  # or the round would wait for no process
            why = "the process for it has ended"
            lost = WorkerExit(rank=-1, local_rank=0, pid=0, time_s=time.time(), start_error=why)
            gone += [lost] * (len(missing) - len(gone))
        for rank, end in zip(missing, gone, strict=False):
            self._perform(self._state.worker_missed(rank, end, now))

    def forget(self) -> None:
        """No worker continues: all are new."""
        self._stand_by_at, self._lets_go_on, self._fruitless = None, False, 0
        self._recovery, self.began_s = None, 0.0
        self._lost_standbys.clear()

    def heard(self, worker: Worker, report: WorkerReport) -> None:
        """A worker reports its progress."""
        if report.stage is Stage.LEAVING and self._state.phase is not Phase.RUNNING:
            return  # it has, or gets, a place in the next round
        before, worker.report = worker.report, report
        if report.round > before.round and worker.answer_by is not None:
            is_all = report.round >= self._state.round
            worker.answer_by = None if is_all else time.monotonic() + ANSWER_S  # it is not stopped
        if report.stage is Stage.READY:
            worker.come_by, self._fruitless = None, 0
            return self.count_ready()
        if worker.rank >= 0:
            is_on = self._keeps and report.is_elastic
            if is_on and not self._is_prepared:
                self._prepare()
            self._perform(self._state.worker_is_elastic(worker.rank, is_on=is_on))
        if report.stage is Stage.LEAVING:
            worker.control.send(Released())
        return self._follow(time.monotonic())

    def _prepare(self) -> None:
        """Load the modules for a recovery early, while no rank waits for them: 3 ms."""
        import mmap  # noqa: F401

        import rallypoint.base.flight_record  # noqa: F401

        self._is_prepared = True

    def _follow(self, now: float) -> None:
        """How far the workers have come on their way to the next round."""
        recovery, workers, number = self._recovery, self._workers, self._state.round
        if recovery is None:
            return
        if workers.have(Stage.JOINED, number):
            recovery.formed(now)
        if workers.have(Stage.SYNCHRONIZED, number):
            self._recovery = None
            begins_again = any(worker.report.begins_again for worker in workers.by_rank.values())
            self._recoveries.add(
                recovery.lost_s(now), is_loss=recovery.is_loss, begins_again=begins_again
            )
            self._progress.went_on(
                recovery.report(workers.by_rank, now),
                cause=recovery.cause,
                lost_s=recovery.lost_s(now),
            )
            if self._lets_go_on:
                self._stand_by_at = now

    def summarize(self, uptime_s: float) -> None:
        """The job is over: report the cost of losses, if there were any; once for all nodes."""
        summary = self._recoveries.summary(uptime_s)
        if summary is not None:
            self._progress.summary(*summary, is_told=self._state.node_rank == 0)

    def count_ready(self) -> None:
        """Tell the coordinator, if there is a place for one of them."""
        self._perform(self._state.workers_ready(len(self._workers.ready)))

    def lost_standby(self, worker: Worker, report: GuardianReport) -> None:
        """A worker on standby has ended."""
        self._workers.lost_standby(worker)
        if self._state.phase in (Phase.ENDING, Phase.STOPPING, Phase.DONE):
            return
        end = worker.exit(report)
        self._lost_standbys.append(end)
        text = f"a worker on standby (pid {end.pid}) {end.what}"
        if worker.report.stage is Stage.READY:  # one that came so far can be replaced
            self._progress.told(text)
            self.count_ready()
            return self._stand_by()
        text += " before it called init_process_group"
        if end.error is not None and is_without_rank(end.error.message):
            text = f"a worker on standby (pid {end.pid}) has ended: {_NEEDS_ELASTIC}"
        elif end.code == 0:
            text += f"; {_NO_RANK}"
        if self._fruitless < self._restarts:
            pause_s = min(_FIRST_PAUSE_S * 2**self._fruitless, _LONGEST_PAUSE_S)
            self._fruitless += 1
            self._stand_by_at, self._lets_go_on = time.monotonic() + pause_s, False
            text += f"; another one is started in {brief(pause_s)}"
        return self._progress.told(text)

    def tick(self, now: float) -> None:
        """Kill workers that do not answer, put others on standby, report those that do not come."""
        if self._stand_by_at is not None and now >= self._stand_by_at:
            self._stand_by_at, self._lets_go_on = None, False
            if self._state.phase in (Phase.RUNNING, Phase.KEEPING):
                self._stand_by()
        for worker in self._workers.standbys:
            if worker.come_by is not None and now >= worker.come_by:
                worker.come_by = None
                self._progress.told(
                    f"a worker on standby (pid {worker.pid}) has not called init_process_group for"
                    f" {COME_S:.0f} s; {_NO_RANK}"
                )
        for worker in self._workers.unanswered(self._state.round, now):
            because = "it did not answer when the others continued"
            text = "does not answer, while the others continue without the lost ranks"
            if worker.is_stopped:
                because = "it was stopped when the others continued"
                text = "is stopped, and the others cannot continue without it"
            self._state.group.killing(worker.rank, because)
            self._progress.told(f"rank {worker.rank} (pid {worker.pid}) {text}; killing it")
            self._perform(NodeDecision((SignalWorkers((worker.rank,), SIGKILL),)))


_MOST_LOST = 4  # in a line


class Recovery:
    """One in-place recovery: from one round to the next, in which workers of this node continue.

        a worker is lost -> known here -> the next round begins -> its group has formed -> all have
                  detect_s        agree_s              form_s                sync_s   the state

    Args:
        over: the workers of the round that is over.
        elsewhere: why it ended, if that was not on this node.
        size_before: how many ranks it had, on all nodes.
        newcomers: how many of this node's workers were not in it.
        known_at: when this node knew of it (time.monotonic).
        now: when the next one began.
        before: the recovery on the way of which there was another loss.
    """

    def __init__(
        self,
        over: WorkerGroup,
        elsewhere: str,
        start: Start,
        *,
        size_before: int,
        newcomers: int,
        known_at: float | None,
        now: float,
        before: Recovery | None,
    ) -> None:
        self._start, self._began, self._elsewhere = start, now, elsewhere
        self._known = now if known_at is None else known_at
        self._failures = over.failures()
        self._is_urgent = start.is_urgent
        self._size_before, self._newcomers = size_before, newcomers
        self._formed: float | None = None
        # The times of losses are the kernel's; all others are of the monotonic clock.
        self._clock_s = time.time() - time.monotonic()
        if before is not None:
            self._failures = [*before._failures, *self._failures]
            causes = filter(None, (before._elsewhere, elsewhere))
            self._elsewhere = "; ".join(dict.fromkeys(causes))
            self._known = min(self._known, before._known)
            self._is_urgent = self._is_urgent or before._is_urgent
            self._size_before = before._size_before
            self._newcomers += before._newcomers

    @property
    def is_loss(self) -> bool:
        """Whether somebody was lost; or else others have joined, or left as planned."""
        return bool(self._failures) or self._is_urgent

    @property
    def cause(self) -> str:
        """Of the loss, as `JobSoFar.losses` has it; empty: nobody was lost."""
        if self._failures:
            return self._failures[0].cause
        return "elsewhere" if self.is_loss else ""

    def formed(self, now: float) -> None:
        """All workers of this node are in the round's group."""
        self._formed = now if self._formed is None else self._formed

    def times(self, now: float) -> dict[str, float | None]:
        """How long each part has taken, if all have the state now; null: no worker was lost
        here.
        """
        formed = now if self._formed is None else self._formed
        lost = [failure.noticed_s - self._clock_s for failure in self._failures]
        return {
            "detect_s": round(max(0.0, self._known - min(lost)), 4) if lost else None,
            "agree_s": round(self._began - self._known, 4),
            "form_s": round(formed - self._began, 4),
            "sync_s": round(now - formed, 4),
        }

    def lost_s(self, now: float) -> float:
        """How long the ranks here did not train: if none was lost, while newcomers got the state.

        Ranks that wait for newcomers do so at an update, and their agent cannot know since when.
        """
        times = self.times(now)
        return (
            sum(each or 0.0 for each in times.values())
            if self._is_urgent
            else times["sync_s"] or 0.0
        )

    def report(self, ranks: Iterable[int], now: float) -> tuple[str, dict[str, object]]:
        """All workers of this node, `ranks`, have the state: a line, and an event."""
        size, here = self._start.seat.world_size, sorted(ranks)
        event: dict[str, object] = {
            "ranks": here,
            "world_size": size,
            "lost_pids": [failure.pid for failure in self._failures],
            "because": self._start.because,
            **self.times(now),
        }
        if not self.is_loss:
            return f"{self._start.because}: the job continues with {size} ranks", event
        lost = [
            f"rank {failure.rank} (pid {failure.pid}) {failure.what}"
            for failure in self._failures[:_MOST_LOST]
        ]
        more = len(self._failures) - len(lost)
        losses = "; ".join(lost) + f"; and {more} more" * bool(more)
        what = losses or self._elsewhere or self._start.because
        if self._newcomers:
            spares = "a spare" if self._newcomers == 1 else f"{self._newcomers} spares"
            what += f"; {spares} took over"
        if size < self._size_before:
            what += f"; {size} of {self._size_before} ranks are left"
        if not here:
            return f"{what}; {size} ranks on other nodes continue", event
        continue_ = "continues" if len(here) == 1 else "continue"
        whole = f"{self.lost_s(now) * 1e3:.0f} ms"
        return f"{what}; {name_ranks(here)} of {size} {continue_} after {whole}", event


class Recoveries:
    """All of a job, on one node."""

    def __init__(self) -> None:
        self._losses = self._other_changes = self._begun_again = 0
        self._lost_s = 0.0

    def add(self, lost_s: float, *, is_loss: bool, begins_again: bool) -> None:
        """Add a recovery, after a loss or a join; `begins_again`: the workers retry a step."""
        self._losses += is_loss
        self._other_changes += not is_loss
        self._lost_s += lost_s
        self._begun_again += begins_again

    def summary(self, uptime_s: float) -> tuple[str, dict[str, object]] | None:
        """A line, and an event; None: there was none."""
        count = self._losses + self._other_changes
        if not count:
            return None
        event: dict[str, object] = {
            "went_on": count,
            "lost_s": round(self._lost_s, 3),
            "uptime_s": round(uptime_s, 3),
            "begun_again": self._begun_again,
        }
        changes = ((self._losses, "loss", "losses"), (self._other_changes, "join", "joins"))
        causes = " and ".join(_counted(*each) for each in changes if each[0])
        text = (
            f"recovered in place after {causes}; {brief(self._lost_s)} of {brief(uptime_s)} lost to"
            f" it; {_counted(self._begun_again, 'step', 'steps')} retried"
        )
        return text, event


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"
