"""What is shown of a running job: a status line or event lines for people, a journal for programs.
The latest events stay in memory, for those who watch the job and for its history.

It only reports; nothing is decided here. Without flags, a job whose output is not redirected prints
only what went wrong.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable

from rallypoint.base.wording import brief, name_ranks
from rallypoint.launch.job import Job, Verbosity
from rallypoint.launch.log_spec import NAMES
from rallypoint.launch.output.terminal import STATUS, is_terminal, say
from rallypoint.launch.worker_group import WorkerExit, signal_name

_STATUS_EVERY_S = 1.0
_MOST_EVENTS = 512  # in memory
_MOST_SAMPLES = 1000  # of steps; then about half of them are dropped
_MOST_TEXT = 300  # characters of an event

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.base.job_so_far import Durations, JobSoFar
    from rallypoint.base.recorded_steps import RecordedSteps
    from rallypoint.base.trained_time import TrainedTime
    from rallypoint.cluster.interface_choice import NetworkChoice
    from rallypoint.launch.output.journal import Journal
    from rallypoint.rendezvous.job.round import Seat


class JobEvents:
    """What has happened in the job so far. It costs next to nothing while nobody asks for it.

    Attributes:
        restarts: how often all workers were started anew.
        steps: the last ones that were counted.
        samples: some steps, each with its time by the monotonic clock.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[float, str, str, float]] = deque(maxlen=_MOST_EVENTS)
        self._losses: dict[str, int] = {}
        self._recoveries: dict[str, Durations] = {}
        self.restarts = 0
        self._trained: TrainedTime | None = None
        self.samples: list[tuple[float, int]] = []
        self._every_s = 0.0  # samples are at least that far apart
        self.steps: RecordedSteps | None = None

    def add(self, kind: str, text: str, lost_s: float = 0.0) -> None:
        """Something has happened; the kinds are those of `JobEvent`."""
        self._newest.append((time.time(), kind, text[:_MOST_TEXT], lost_s))

    def lost(self, cause: str) -> None:
        """Ranks were lost."""
        self._losses[cause] = self._losses.get(cause, 0) + 1

    def recovered(self, times: dict[str, object], lost_s: float) -> None:
        """Workers have continued after a loss; `times` are those of the event went_on."""
        from rallypoint.base.job_so_far import PARTS, Durations

        for part in PARTS:
            took_s = lost_s if part == "all" else times[f"{part}_s"]
            if isinstance(took_s, float):
                before = self._recoveries.get(part, Durations())
                self._recoveries[part] = before.with_one(took_s)

    def restarted(self) -> None:
        """All workers are started anew."""
        self.restarts += 1
        if self._trained is not None:
            self._trained = self._trained.with_new_processes()

    def interrupted(self) -> None:
        """Something keeps the workers from training, after the steps that were counted."""
        if self._trained is not None:
            self._trained = self._trained.interrupted()

    def count(self, steps: RecordedSteps | None) -> None:
        """Count the steps that were done since the last time; None: none are known."""
        if steps is None:
            return
        from rallypoint.base.trained_time import TrainedTime

        self.steps, before = steps, self._trained or TrainedTime()
        self._sample(pair for pair in steps.log if pair[0] > before.at_s)
        if len(self.samples) > _MOST_SAMPLES:
            self._every_s = 2 * (self.samples[-1][0] - self.samples[0][0]) / _MOST_SAMPLES
            pairs, self.samples = self.samples, []
            self._sample(pairs)
        self._trained = before.after(steps)

    def _sample(self, pairs: Iterable[tuple[float, int]]) -> None:
        for at_s, step in pairs:
            if not self.samples or at_s >= self.samples[-1][0] + self._every_s:
                self.samples.append((at_s, step))

    def so_far(self, newest: int = _MOST_EVENTS) -> JobSoFar:
        """All of it, with so many events."""
        from rallypoint.base.job_so_far import JobEvent, JobSoFar

        events = tuple(self._newest)[-newest:]
        return JobSoFar(
            events=tuple(
                JobEvent(at=at, kind=kind, text=text, lost_s=lost_s)
                for at, kind, text, lost_s in events
            ),
            losses=dict(self._losses),
            restarts=self.restarts,
            recoveries=dict(self._recoveries),
            trained=self._trained,
        )


class ProgressReporter:
    """Reports the agent's events. `tick` is due at `wake_at`; None: there is no status line.

    Attributes:
        events: what has happened so far.
    """

    def __init__(self, job: Job, now: float) -> None:
        self._job = job
        self._began = now
        self.events = JobEvents()
        self._journal: Journal | None = None
        self._round = 0
        self._round_size = 0
        self._start_text = ""
        self._has_reported_network = False
        is_hidden = job.logs.hides_output and job.verbosity is not Verbosity.QUIET
        self.wake_at = now if is_hidden and is_terminal() and _has_terminal(job) else None
        self._tells_events = job.verbosity is Verbosity.VERBOSE or (
            is_hidden and self.wake_at is None
        )
        if job.events_file or job.prints_events:
            from rallypoint.launch.output.journal import Journal

            self._journal = Journal(job)

    def job_began(self, logs: str) -> None:
        """The agent has started; `logs` is where the user finds them, if there are any."""
        if logs and self._job.verbosity is not Verbosity.QUIET:
            say(f"logs: {logs}")
        self._record(
            "job_began",
            command=list(self._job.command),
            nnodes=self._job.nodes.count,
            nproc_per_node=self._job.local_world_size,
            max_restarts=self._job.max_restarts,
            logs=logs or None,
        )

    def network_chosen(self, network: NetworkChoice | None) -> None:
        """The interface at which others reach this node; None if it is not known yet.

        Reported once: only to the journal if there was no alternative, and not at all if all nodes
        are on this machine.
        """
        if network is None or network.is_loopback or self._has_reported_network:
            return
        self._has_reported_network = True
        if network.had_rivals or self._job.verbosity is Verbosity.VERBOSE:
            self.told(f"{'warning: ' if network.is_doubtful else ''}network: {network.told}")
        self._record("network", **network.event)

    def round_failed(self, what: str, cause: str) -> None:
        """Ranks were lost, and all workers are to be started anew."""
        self.events.add("loss", what)
        self.events.lost(cause)

    def round_began(self, seat: Seat, because: str) -> None:
        """Workers are being started on this node, or continue there."""
        number, ranks = seat.number, seat.ranks
        size = "1 rank" if seat.world_size == 1 else f"{seat.world_size} ranks"
        size += f" on {seat.nodes} nodes" if seat.nodes > 1 else ""
        why = f": {because}" if because else ""
        self.events.add("round", f"round {number} begins with {size}{why}")
        self._round, self._round_size = number, len(ranks)
        self._start_text = f"round {number}: {name_ranks(ranks)} started"
        if self._journal is not None:
            self._journal.node_rank = seat.node_rank
        self._record("round_began", round=number, ranks=list(ranks), because=because)

    def round_runs(self) -> None:
        """All workers have been started, and the end of the round before has been reported."""
        if self._tells_events:
            say(self._start_text)

    def worker_started(self, rank: int, pid: int) -> None:
        """A worker has a process."""
        self._record("worker_started", round=self._round, rank=rank, pid=pid)

    def worker_ended(self, end: WorkerExit) -> None:
        """A worker has ended."""
        text = end.text if end.failed else ""
        if text and self._job.verbosity is Verbosity.VERBOSE:
            say(text)
        self._record(
            "worker_ended",
            round=self._round,
            rank=end.rank,
            pid=end.pid,
            code=end.code,
            signal=None if end.signal is None else signal_name(end.signal),
            error=text or None,
        )

    def calls_seen(self, events: Callable[[], list[dict[str, object]]]) -> None:
        """Something went wrong, and these are the workers' calls."""
        if self._journal is not None:
            self._record("operations", round=self._round, operations=events())

    def signal_received(self, number: int) -> None:
        """Someone sent the agent a signal."""
        self.events.add("signal", f"the launcher got {signal_name(number)}")
        self._record("signal", signal=signal_name(number))

    def decided(self, where: str, reason: str) -> None:
        """A decision, and why."""
        if self._job.verbosity is Verbosity.VERBOSE:
            say(f"{where}: {reason}")
        self._record("decision", phase=where, reason=reason)

    def preload(self, text: str, *, state: str, is_told: bool) -> None:
        """What has become of the process of --preload."""
        is_shown = is_told and self._job.verbosity is not Verbosity.QUIET
        if is_shown or self._job.verbosity is Verbosity.VERBOSE:
            say(f"--preload: {text}")
        self._record("preload", state=state, modules=list(self._job.preload), text=text)

    def told(self, text: str) -> None:
        """A message for the user while the job continues."""
        if self._job.verbosity is not Verbosity.QUIET:
            say(text)

    def hangs(self, text: str, event: dict[str, object], steps: RecordedSteps | None) -> None:
        """The job hangs, after these steps."""
        self.told(text)
        self.events.add("hang", text)
        self.events.count(steps)
        self.events.interrupted()
        self._record("hang", round=self._round, **event, on_hang=self._job.on_hang.value)

    def goes_on(self, rank: int, waited_s: float, was_stopped: bool = False) -> None:
        """A hang is over: what that rank waited for has come, or it is not stopped any more."""
        state = "stopped" if was_stopped else "waiting"
        text = f"the job continues: rank {rank} is no longer {state}, after {brief(waited_s)}"
        self.told(text)
        self.events.add("hang over", text)
        self._record("hang_over", round=self._round, rank=rank, waited_s=round(waited_s, 3))

    def went_on(self, told: tuple[str, dict[str, object]], *, cause: str, lost_s: float) -> None:
        """After a loss, or with newcomers, all workers of this node are in a new round.

        Args:
            cause: of the loss; empty: there was none.
            lost_s: how long the ranks here did not train.
        """
        text, event = told
        self.told(text)
        self.events.add("loss" if cause else "join", text, lost_s)
        if cause:
            self.events.lost(cause)
            self.events.recovered(event, lost_s)
        self._record("went_on", round=self._round, **event)

    def summary(self, text: str, event: dict[str, object], *, is_told: bool) -> None:
        """The time that in-place recovery has cost the job."""
        if is_told:
            self.told(text)
        self._record("summary", **event)

    def job_ended(self, status: int, text: str, now: float) -> None:
        """The job is over; `text` says what went wrong, if something did."""
        STATUS.hide()
        uptime_s = now - self._began
        self.events.add("end", text.partition("\n")[0] or "the job succeeded")
        if text:
            say(text)
        elif self._tells_events:
            say(f"job succeeded after {duration(uptime_s)}")
        self._record("job_ended", status=status, uptime_s=round(uptime_s, 3), text=text or None)

    def close(self) -> None:
        """Write the last event."""
        if self._journal is not None:
            self._journal.close()

    def tick(self, now: float, running: int, steps: Callable[[], RecordedSteps | None]) -> None:
        """Renew the status line."""
        if self.wake_at is None or now < self.wake_at:
            return
        self.wake_at = now + _STATUS_EVERY_S
        STATUS.show(
            f"round {self._round} | {running}/{self._round_size} ranks running |"
            f" {self.events.restarts} restarts | {duration(now - self._began)}"
            + (f" | {step_text(done)}" if (done := steps()) is not None else "")
        )

    def _record(self, event: str, **fields: object) -> None:
        if self._journal is not None:
            self._journal.record(event, fields)


def _has_terminal(job: Job) -> bool:
    """Whether only the launcher writes to the terminal; otherwise it has no status line."""
    return all(
        job.logs.passes_through(local_rank, stream) or not os.isatty(stream)
        for local_rank in range(job.local_world_size)
        for stream in NAMES
    )


def step_text(steps: RecordedSteps) -> str:
    """``"step 18,204 of 50,000, 36 %, 3:51:10 left"``; what is not known is left out."""
    parts = [f"step {steps.step:,}"]
    if steps.total is not None and steps.share is not None:
        parts = [f"step {steps.step:,} of {steps.total:,}", f"{steps.share * 100:.0f} %"]
    if steps.remaining_s is not None:
        parts.append(f"{duration(steps.remaining_s)} left")
    return ", ".join(parts)


def share(part: float) -> str:
    """``"99.2 %"``; less than all is never rounded to all."""
    return f"{min(part * 100, 99.9 if part < 1 else 100.0):.1f} %"


def duration(seconds: float) -> str:
    """``"40 ms"``, ``"3.2 s"``, ``"1:05"``, ``"2:00:07"``."""
    if seconds < 60:
        return brief(seconds)
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
