"""What is shown of a running job: a status line or event lines for people, a journal for programs.

It only reports; nothing is decided here. Without flags, a job whose output is not redirected prints
only what went wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rallypoint.base.wording import brief, name_ranks
from rallypoint.launch.job import Job, Verbosity
from rallypoint.launch.log_spec import NAMES
from rallypoint.launch.output.terminal import STATUS, is_terminal, say
from rallypoint.launch.worker_group import WorkerExit, signal_name

_STATUS_EVERY_S = 1.0

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.base.recorded_steps import RecordedSteps
    from rallypoint.cluster.interface_choice import NetworkChoice
    from rallypoint.launch.output.journal import Journal


class ProgressReporter:
    """Reports the agent's events. `tick` is due at `wake_at`; None: there is no status line."""

    def __init__(self, job: Job, now: float) -> None:
        self._job = job
        self._began = now
        self._journal: Journal | None = None
        self._round = 0
        self._restarts = 0
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

    def round_began(self, number: int, node_rank: int, ranks: Sequence[int], because: str) -> None:
        """Workers are being started on this node."""
        self._round, self._round_size = number, len(ranks)
        self._restarts += bool(because)
        self._start_text = f"round {number}: {name_ranks(ranks)} started"
        if self._journal is not None:
            self._journal.node_rank = node_rank
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

    def hangs(self, text: str, event: dict[str, object]) -> None:
        """The job hangs."""
        self.told(text)
        self._record("hang", round=self._round, **event, on_hang=self._job.on_hang.value)

    def goes_on(self, rank: int, waited_s: float, was_stopped: bool = False) -> None:
        """A hang is over: what that rank waited for has come, or it is not stopped any more."""
        state = "stopped" if was_stopped else "waiting"
        self.told(f"the job continues: rank {rank} is no longer {state}, after {brief(waited_s)}")
        self._record("hang_over", round=self._round, rank=rank, waited_s=round(waited_s, 3))

    def went_on(self, told: tuple[str, dict[str, object]]) -> None:
        """After a loss, or with newcomers, all workers of this node are in a new round."""
        text, event = told
        self.told(text)
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
            f" {self._restarts} restarts | {duration(now - self._began)}"
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


def duration(seconds: float) -> str:
    """``"40 ms"``, ``"3.2 s"``, ``"1:05"``, ``"2:00:07"``."""
    if seconds < 60:
        return brief(seconds)
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
