"""The agent: one thread, one event loop, that performs what decide.py decides.

It waits for kernel events only: the guardian's reports, the workers' control sockets and output,
signals, and the one deadline that the decisions set. It holds no policy.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from rallypoint.base.control_message import WorkerError
from rallypoint.launch.decide import (
    Decision,
    EndEverything,
    Finish,
    JobState,
    SignalWorkers,
    State,
)
from rallypoint.launch.guardian import Guardian, GuardianLostError, Report, ReportKind
from rallypoint.launch.job import STOP_SIGNALS, Job
from rallypoint.launch.logs import Outlet, open_outlets
from rallypoint.launch.scratch import Scratch
from rallypoint.launch.store_host import StoreHost
from rallypoint.launch.worker import Worker

_PATIENCE_WHEN_STOPPED_S = 1.0
_FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)


def run(job: Job) -> int:
    """Run `job` to its end and return the exit status for the launcher.

    Raises:
        HostError: the store or the guardian could not be started; nothing is left running.
        InvalidArgumentError: the command cannot be handed to a program; nothing is left running.
    """
    _fill_standard_descriptors()
    agent = Agent(job)
    try:
        with _Signals(agent.selector, agent.signal_received):
            try:
                agent.start()
                status = agent.wait()
            finally:
                agent.end()
    finally:
        # Signals work as ever again: nothing runs any more, and the reader may be slow.
        agent.close()
    agent.report()
    return status


class Agent:
    """Starts, watches and ends the workers of one job."""

    def __init__(self, job: Job) -> None:
        self.selector = selectors.DefaultSelector()
        self._job = job
        self._state = JobState(job.local_world_size, shutdown_timeout_s=job.shutdown_timeout_s)
        self._store: StoreHost | None = None
        self._guardian: Guardian | None = None
        self._scratch: Scratch | None = None
        self._workers: list[Worker] = []
        self._outlets: tuple[Outlet, Outlet] | None = None
        self._unkillable: list[int] = []
        self._started = time.monotonic()

    def start(self) -> None:
        """Start the store, the guardian and all workers."""
        self._store = StoreHost()
        self._scratch = Scratch(self._job.run_id, self._job.environ)
        self._guardian = Guardian(temporary_directory=self._scratch.path)
        self.selector.register(self._guardian, selectors.EVENT_READ, self._guardian_spoke)
        if self._job.log_prefix is not None:
            self._outlets = open_outlets(self.selector)
        for local_rank in range(self._job.local_world_size):
            worker = Worker(self._job, local_rank, self._scratch.error_file(local_rank))
            self._workers.append(worker)
            if self._outlets is not None:
                worker.redirect(self._outlets, self.selector)
            try:
                worker.start(self._guardian, self._store.endpoint)
            except GuardianLostError:
                return  # wait() finds out the same way
            self.selector.register(
                worker.control, selectors.EVENT_READ, lambda worker=worker: self._read(worker)
            )
        self._store.serve()

    def wait(self) -> int:
        """Perform decisions until the job is over; the exit status."""
        while self._state.state is not State.DONE:
            timeout = None
            if self._state.wake_at is not None:
                timeout = max(0.0, self._state.wake_at - time.monotonic())
            for key, _ in self.selector.select(timeout):
                key.data()
            self._perform(self._state.tick(time.monotonic()))
        return self._state.status

    def end(self) -> None:
        """Leave no process behind."""
        if self._guardian is not None:
            self._guardian.close()
        if self._state.guardian_was_lost and self._scratch is not None:
            self._scratch.kill_marked()
        if self._store is not None:
            self._store.close()

    def close(self) -> None:
        """Pass on the last output, and close everything."""
        patience_s = None if self._state.stop_signal is None else _PATIENCE_WHEN_STOPPED_S
        for worker in self._workers:
            worker.drain_output(patience_s)
            worker.control.close()
        for outlet in self._outlets or ():
            outlet.flush(patience_s)
        self.selector.close()

    def report(self) -> None:
        """Tell how the job ended, unless all is well."""
        stop_signal = self._state.stop_signal
        if self._state.status == 0 and not self._state.unkillable:
            return
        from rallypoint.launch.failure import signal_name, summary

        text = summary(
            self._state,
            host=self._job.host,
            local_ranks={worker.rank: worker.local_rank for worker in self._workers},
        )
        if stop_signal is not None and not text:
            after_s = time.monotonic() - self._started
            text = f"stopped by {signal_name(stop_signal)} after {after_s:.1f} s"
        say(text)

    # Events.

    def signal_received(self, number: int) -> None:
        """A signal came for the agent."""
        if number in _FORWARDED:
            self._signal(SignalWorkers(tuple(sorted(self._state.running)), number))
        else:
            self._perform(self._state.stop_requested(number, time.monotonic()))

    def _guardian_spoke(self) -> None:
        assert self._guardian is not None
        try:
            reports = self._guardian.read()
        except GuardianLostError:
            self.selector.unregister(self._guardian)
            self._perform(self._state.guardian_lost())
            return
        for report in reports:
            self._reported(report)

    def _reported(self, report: Report) -> None:
        match report.kind:
            case ReportKind.STARTED:
                self._workers[report.worker].pid = report.pid
            case ReportKind.EXITED | ReportKind.SPAWN_FAILED:
                self._worker_ended(self._workers[report.worker], report)
            case ReportKind.UNKILLABLE:
                self._unkillable.append(report.pid)
            case ReportKind.ENDED:
                self._perform(self._state.everything_ended(tuple(self._unkillable)))

    def _worker_ended(self, worker: Worker, report: Report) -> None:
        now = time.monotonic()
        end = worker.exit(report)
        self._read(worker)  # what it said before it ended counts as before
        if not end.succeeded and worker.rank not in self._state.errors:
            from rallypoint.launch.failure import read_error_file

            error = worker.recorded_error(lambda text: read_error_file(text, time_s=end.time_s))
            if error is not None:
                self._perform(self._state.worker_reported(worker.rank, error, now))
        self._perform(self._state.worker_exited(end, now))

    def _read(self, worker: Worker) -> None:
        messages, is_open = worker.control.receive()
        if not is_open and worker.control in self.selector.get_map():
            self.selector.unregister(worker.control)
        for message in messages:
            if isinstance(message, WorkerError):
                now = time.monotonic()
                self._perform(self._state.worker_reported(worker.rank, message, now))

    # Actions.

    def _perform(self, decision: Decision) -> None:
        if decision.reason and self._job.verbose:
            say(f"{self._state.state.value}: {decision.reason}")
        for action in decision.actions:
            match action:
                case SignalWorkers():
                    if self._state.state is State.STOPPING and action.signal != signal.SIGCONT:
                        for rank in action.ranks:
                            self._workers[rank].control.abort(decision.reason)
                    self._signal(action)
                case EndEverything():
                    self._to_guardian(lambda guardian: guardian.end())
                case Finish():
                    pass  # wait() sees that the state is DONE

    def _signal(self, action: SignalWorkers) -> None:
        for rank in action.ranks:
            self._to_guardian(
                lambda guardian, rank=rank: guardian.signal(rank, action.signal)  # type: ignore[misc]
            )

    def _to_guardian(self, request: Callable[[Guardian], None]) -> None:
        if self._guardian is None:
            return
        try:
            request(self._guardian)
        except GuardianLostError:
            self._perform(self._state.guardian_lost())


class _Signals:
    """While in force, stop signals and those to forward arrive as events of the loop."""

    def __init__(self, selector: selectors.BaseSelector, callback: Callable[[int], None]) -> None:
        self._callback = callback
        self._selector = selector
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._reading, selectors.EVENT_READ, self._read)
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in (*(getattr(signal, name) for name in STOP_SIGNALS), *_FORWARDED):
            # nohup ignores SIGHUP, and means the job too.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._before[number] = signal.signal(number, _note)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self._reading)
        os.close(self._writing)

    def _read(self) -> None:
        for number in os.read(self._reading, 4096):
            self._callback(number)


def _fill_standard_descriptors() -> None:
    """Were one of 0, 1 and 2 closed, workers would get a descriptor of ours in its place."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one


def _note(_number: int, _frame: FrameType | None) -> None:
    """Nothing: but without a handler Python would not write to the wakeup descriptor."""


def say(text: str) -> None:
    """One message of the launcher on stderr."""
    try:
        # A carriage return at a terminal: the message replaces the "^C" that may stand there.
        start = "\r" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}rallypoint: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # closed, or None
        return  # nobody listens; the exit status still tells
