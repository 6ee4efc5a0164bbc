"""The agent: one thread, one event loop, that performs what node.py decides.

It waits only for kernel events: the guardian's reports, the workers' control sockets and output,
signals, the coordinator's orders, and the deadlines that decisions set. It holds no policy and
never blocks otherwise: what may block has its own thread, or a queue.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from rallypoint.base.control_message import (
    CallTimedOut,
    LongWait,
    LostContact,
    WorkerError,
    WorkerReport,
)
from rallypoint.base.ready import call_ready, earliest, left_until
from rallypoint.launch.agent.final_reports import JobResult, OomKills, Reports
from rallypoint.launch.agent.guardian import (
    Guardian,
    GuardianLostError,
    GuardianReport,
    ReportKind,
    choose_sessions,
)
from rallypoint.launch.agent.in_place_recovery import InPlaceRecovery
from rallypoint.launch.agent.local_workers import AgentParts, LocalWorkers, Worker
from rallypoint.launch.agent.node import (
    EndElsewhere,
    EndEverything,
    KeepWorkers,
    NodeDecision,
    NodeState,
    PauseEverything,
    Phase,
    ResumeEverything,
    SignalWorkers,
    Tell,
)
from rallypoint.launch.agent.signals import FORWARDED, Signals
from rallypoint.launch.agent.stuck_ranks import StuckRanks
from rallypoint.launch.inspection.entries import Entry, make_entry
from rallypoint.launch.job import HISTORY, Job, with_silence
from rallypoint.launch.output.progress import ProgressReporter
from rallypoint.launch.output.sink import STDERR
from rallypoint.launch.output.streams import Output
from rallypoint.launch.rounds import rounds_of
from rallypoint.launch.rounds.source import RoundSource
from rallypoint.launch.rounds.store_host import allow_many_connections, make_room
from rallypoint.launch.worker_group import WorkerExit, signal_name
from rallypoint.rendezvous.job.reports import Finish, Notice, Outcome, Start, Stop, assert_never
from rallypoint.rendezvous.job.round import Seat

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.launch.agent.answers import AgentAnswers
    from rallypoint.launch.agent.step_signals import StepSignals
    from rallypoint.launch.agent.template_process import TemplateProcess

# At the end, how long a reader of the output may take nothing until it is left to itself.
_PATIENCE_S = 30.0
_PATIENCE_WHEN_STOPPED_S = 1.0
_LAST_WORDS_S = 2.0  # the same for what the launcher itself says
_DESCRIPTORS, _DESCRIPTORS_EACH = 24, 6  # of the agent, and for a worker, with log files


def run(job: Job) -> int:
    """Run `job` to its end and return the exit status for the launcher; raises as `perform`."""
    return perform(job).status


def perform(job: Job, rounds: RoundSource | None = None) -> JobResult:
    """Run `job` to its end, with other nodes if `rounds` or the job require it."""
    fill_standard_descriptors()
    try:
        return _run_agent(job, rounds or rounds_of(job))
    except (OSError, RuntimeError) as error:
        from rallypoint.base.refusals import refusal_in

        workers = job.local_world_size
        descriptors = _DESCRIPTORS + _DESCRIPTORS_EACH * workers
        need = f"{workers} workers need about {descriptors}" if workers else ""
        raise refusal_in(error, who="the launcher", need=need) or error from None


def _run_agent(job: Job, rounds: RoundSource) -> JobResult:
    agent = Agent(with_silence(job, rounds.silence_s), rounds)
    try:
        with Signals(agent.selector, agent.signal_received, job.stop_signals):
            try:
                agent.start()
                agent.wait()
            finally:
                agent.end()
    except BaseException:
        agent.close(is_heard=agent.pass_on_output())
        raise
    # Signals have their usual effects again: nothing runs any more, and the reader may be slow.
    is_heard = agent.pass_on_output()
    agent.report()
    agent.close(is_heard=is_heard)
    return agent.result


class Agent:
    """Starts, watches and ends the workers of one node, round after round.

    Args:
        selector: what it waits with.
        make_guardian: starts the guardian.
    """

    def __init__(
        self,
        job: Job,
        rounds: RoundSource,
        *,
        selector: selectors.BaseSelector | None = None,
        make_guardian: Callable[..., Guardian] = Guardian,
    ) -> None:
        self.selector = selector or selectors.DefaultSelector()
        self._job = job
        self._make_guardian = make_guardian
        self._rounds = rounds
        self._state = NodeState(
            node_rank=job.nodes.node_rank, shutdown_timeout_s=job.shutdown_timeout_s
        )
        self._guardian: Guardian | None = None
        self._output: Output | None = None
        self._workers = LocalWorkers(job, self.selector, self._read)
        self._unkillable: list[int] = []
        self._oom_kills = OomKills()
        self._started = time.monotonic()
        self._reports = Reports(job, self._state, self._oom_kills, self._started)
        self._progress = ProgressReporter(job, self._started)
        self._fence: tuple[float | None, bool] = (None, False)  # what the guardian knows
        self._writes_to_guardian = False
        self._step_signals: StepSignals | None = None  # in a Slurm step
        self._entry: Entry | None = None  # where programs that ask find this agent
        self._answers: AgentAnswers | None = None  # once one has asked
        self._template: TemplateProcess | None = None  # with --preload
        self._stopped_by = ""
        self._parts = AgentParts(
            job=job,
            selector=self.selector,
            rounds=rounds,
            state=self._state,
            workers=self._workers,
            progress=self._progress,
            perform=self._perform,
            inspect=self._inspect_workers,
            read_workers=self._read_workers,
        )
        self._stuck_ranks = StuckRanks(self._parts)
        self._recovery = InPlaceRecovery(self._parts, stand_by=self._stand_by)

    def start(self) -> None:
        """Start the guardian, and join the others."""
        self._output = Output(self._job, self.selector)
        directory = self._output.directory
        self._progress.job_began(self._output.kept_in)
        sessions = choose_sessions(self._job.local_world_size, self._job.environ)
        self._guardian = self._make_guardian(
            temporary_directory=directory.to_remove, sessions=sessions
        )
        self.selector.register(self._guardian, selectors.EVENT_READ, self._guardian_spoke)
        if self._job.has_template:  # it imports while the nodes meet
            from rallypoint.launch.agent.template_process import TemplateProcess

            self._template = TemplateProcess(self._parts, directory.path, self._to_guardian)
            self._template.start()
        self._oom_kills.reset()
        self._step_signals = _step_signals(self._job, self._send_signal)
        if self._job.rendezvous is not None or self._job.nodes.count > 1:
            allow_many_connections()  # to this process: the guardian's workers keep their limit
        self._rounds.inquired = self._inquired
        self._rounds.open(self.selector)
        self._progress.network_chosen(self._rounds.network)
        self._entry = make_entry(self._job, self._output.kept_in)
        if self._entry is not None:
            self.selector.register(self._entry, selectors.EVENT_READ, self._asked)

    def wait(self) -> None:
        """Perform orders and decisions until the job is over."""
        while self.prepare():
            self.turn(left_until(self.wake_at))

    def prepare(self) -> bool:
        """Perform the orders that have come, before the next turn; False: the job is over."""
        self._obey()
        if self._state.phase is Phase.DONE:
            return False
        self._renew_fence()
        self._watch_guardian()
        return True

    def turn(self, timeout_s: float | None) -> None:
        """Wait for events once, and perform what follows, except for orders."""
        call_ready(self.selector, timeout_s)
        self._perform(self._state.tick(time.monotonic()))
        self._recovery.tick(time.monotonic())
        self._stuck_ranks.tick(time.monotonic())
        if self._step_signals is not None:
            self._step_signals.tick(time.monotonic())
        wake_at = self._rounds.wake_at
        if wake_at is not None and time.monotonic() >= wake_at:
            self._rounds.tick()
        self._progress.tick(time.monotonic(), len(self._state.group.running), self._workers.steps)

    @property
    def wake_at(self) -> float | None:
        """When the next turn is due at the latest; None: only events matter."""
        alarms = [self._state.wake_at, self._rounds.wake_at, self._progress.wake_at]
        alarms += [self._recovery.wake_at, self._stuck_ranks.wake_at]
        if self._step_signals is not None:
            alarms.append(self._step_signals.wake_at)
        return earliest(*alarms)

    def end(self) -> None:
        """End all processes."""
        self._count_steps()
        self._stuck_ranks.close()
        if self._template is not None:
            self._template.close()
        if self._answers is not None:
            self._answers.close()
        if self._entry is not None:
            self.selector.unregister(self._entry)
            self._entry.close()
            self._entry = None
        if self._guardian is not None:
            # One that was asked to end everything and did not answer gets no second chance.
            self._guardian.close(*([0.0] if self._state.guardian_lost_because else []))
        if self._step_signals is not None:
            self._step_signals.close()
        if self._state.guardian_lost_because and self._output is not None:
            self._output.directory.kill_marked()
        self._rounds.close()

    def pass_on_output(self) -> bool:
        """Write the workers' last output; returns whether all readers took it in time."""
        self._workers.let_all_go()
        wait_s = _PATIENCE_S if self._state.stop_signal is None else _PATIENCE_WHEN_STOPPED_S
        return self._output is None or self._output.flush(wait_s)

    def close(self, *, is_heard: bool) -> None:
        """Write the launcher's last messages, waiting briefly for readers; close everything."""
        self._workers.let_all_go()
        if self._output is not None:
            self._output.close()
        self._progress.close()
        STDERR.flush(_LAST_WORDS_S if is_heard else 0.0)
        self.selector.close()

    def report(self) -> None:
        """Report how the job ended, unless it succeeded."""
        self._recovery.summarize(time.monotonic() - self._started)
        lines = self._reports.of_job(
            self._workers.evidence,
            stopped_by=self._stopped_by,
            hint=self._where_logs_are,
            stderr_of=self._stderr_of,
        )
        ended = time.time()
        self._progress.job_ended(self._state.status, "\n".join(lines), time.monotonic())
        evidence = self._workers.evidence
        if lines and evidence is not None:
            evidence.keep(
                self._state.group,
                oom_kills=self._oom_kills.new,
                status=self._state.status,
                hang=self._state.hang,
                logs="" if self._output is None else self._output.kept_in,
                ended=ended,
            )
        if self._job.keeps_history and self._job.environ.get(HISTORY) != "off":
            self._reports.keep_history(
                self._workers.seat,
                self._progress.events,
                self._output,
                ended=ended,
                text="\n".join(lines),
            )

    @property
    def result(self) -> JobResult:
        """How it ended."""
        seat = self._workers.seat
        return JobResult(
            status=self._state.status,
            ranks=range(0) if seat is None else seat.ranks,
            failures=tuple(self._state.group.failures()),
        )

    def _where_logs_are(self, local_rank: int | None) -> str:
        is_over = self._state.phase is Phase.DONE
        return self._output.hint(local_rank) if self._output is not None and is_over else ""

    def _stderr_of(self, local_rank: int) -> str:
        return "" if self._output is None else self._output.stderr_of(local_rank)

    def _count_steps(self) -> None:
        """Workers are about to end, or to continue in another round: count what they have done."""
        try:
            self._progress.events.count(self._workers.steps())
        except Exception:  # whatever they wrote there
            return

    def _read_records(self) -> None:
        """After trouble: record the workers' calls before they react to it."""
        evidence = self._workers.evidence
        if evidence is not None and evidence.records.look(self._workers.record_slots):
            self._progress.calls_seen(evidence.records.events)

    def _inspect_workers(self) -> None:
        """Someone is ending the job: inspect the workers."""
        self._read_records()
        if self._workers.evidence is not None:
            self._workers.evidence.inspect(
                {pid: rank for rank, pid in self._workers.pids.items() if pid}
            )

    # Programs, and other agents, that ask.

    def _asked(self) -> None:
        connection = None if self._entry is None else self._entry.accept()
        if connection is not None:
            self._answering().conversations.begin(connection)

    def _inquired(self, key: str, payload: bytes) -> None:
        self._answering().heard(key, payload)

    def _answering(self) -> AgentAnswers:
        if self._answers is not None:
            return self._answers
        from rallypoint.launch.agent.answers import AgentAnswers

        self._answers = AgentAnswers(
            self._parts,
            self._oom_kills,
            began=self._started,
            stop=self._stop_asked,
            reported=self._stuck_ranks.reported,
        )
        return self._answers

    def _stop_asked(self, why: str) -> None:
        """The user asked to end the whole job."""
        self._stopped_by = self._stopped_by or why
        self._inspect_workers()
        text = f"{why} stopped the job"
        self._perform(self._state.stop_requested(signal.SIGTERM, text, time.monotonic()))

    # Orders.

    def _obey(self) -> None:
        while self._rounds.orders:
            now = time.monotonic()
            order = self._rounds.orders.pop(0)
            match order:
                case Start():
                    self._start_round(order)
                case Stop():
                    self._read_records()
                    self._read_workers()  # who can continue in the next round
                    self._perform(self._state.round_stopped(order, now))
                case Finish():
                    self._perform(self._state.finished(order, now))
                case _:
                    assert_never(order)

    def _start_round(self, start: Start) -> None:
        self._count_steps()
        if self._state.phase is Phase.KEEPING:
            self._progress.events.interrupted()
            self._recovery.begin(start)
            return self._rounds.settle()  # workers that continue are about to need the store
        failed, elsewhere = self._state.group, self._state.stopped_because
        seat, before = start.seat, self._state.round
        ranks = seat.ranks
        decision = self._state.started(seat.number, ranks, seat.node_rank)
        if not decision.reason:  # something runs, or nothing will any more
            return None
        self._perform(decision)
        calls = self._reports.calls(self._workers.evidence)
        self._workers.let_all_go()
        if self._step_signals is not None:
            self._step_signals.forget()
        self._recovery.forget()
        if start.because and before >= 0:
            if failures := failed.failures():
                self._progress.round_failed(failures[0].text, failures[0].cause)
            elif start.is_urgent:
                self._progress.round_failed(elsewhere or start.because, "elsewhere")
            self._progress.events.restarted()
        self._progress.network_chosen(self._rounds.network)  # if it was not known before
        self._progress.round_began(seat, start.because)
        self._spawn(seat)
        self._rounds.settle()
        if seat.node_rank == 0:  # its agent serves the store; start() made room for far ranks
            make_room(len(ranks))
        if start.because and before >= 0:  # a newcomer has seen nothing of it
            self._progress.told(
                self._reports.of_round(
                    before, failed, because=start.because, elsewhere=elsewhere, calls=calls
                )
            )
            self._oom_kills.reset()
        self._progress.round_runs()
        has_empty_places = seat.local_world_size < self._job.local_world_size
        if (
            self._job.spares
            or not seat.local_world_size
            or (has_empty_places and start.may_replace)
        ):
            self._stand_by()
        return None

    def _spawn(self, seat: Seat) -> None:
        output = self._output
        assert output is not None
        self._renew_fence()
        self._to_guardian(lambda guardian: self._workers.begin(guardian, output, seat))

    def _stand_by(self) -> None:
        output = self._output
        assert output is not None
        self._to_guardian(lambda guardian: self._workers.stand_by(guardian, output))

    # Events.

    def signal_received(self, number: int) -> None:
        """The agent received a signal."""
        self._progress.signal_received(number)
        is_to_stop = signal.Signals(number).name in self._job.stop_signals
        if is_to_stop:
            self._inspect_workers()
        if number in FORWARDED and not is_to_stop:
            self._signal(SignalWorkers(tuple(sorted(self._state.group.running)), number))
        else:
            text = f"{signal_name(number)} stopped node {self._state.node_rank}"
            now = time.monotonic()
            # Ctrl-C is meant for the job; schedulers preempt or drain a node with other signals.
            leaves = self._rounds.may_leave and number != signal.SIGINT
            self._perform(self._state.stop_requested(number, text, now, leaves=leaves))
            if leaves:
                finish = Finish(outcome=Outcome.STOPPED, because=text)
                self._perform(self._state.finished(finish, now))

    def _guardian_spoke(self) -> None:
        assert self._guardian is not None
        try:
            reports = self._guardian.read(wait=False)
        except GuardianLostError:
            self.selector.unregister(self._guardian)
            self._perform(self._state.guardian_lost())
            return
        for report in reports:
            self._reported(report)

    def _reported(self, report: GuardianReport) -> None:
        match report.kind:
            case ReportKind.UNKILLABLE:
                self._unkillable.append(report.pid)
            case ReportKind.ENDED:
                self._perform(self._state.everything_ended(tuple(self._unkillable)))
            case ReportKind.FENCED:
                self._rounds.fenced()
                self._obey()  # before the ends that follow, which are no failures
            case _:
                worker = self._workers.of(report.worker)
                if worker is None:
                    if self._template is not None and self._template.is_about(report):
                        self._template.reported(report)
                    return  # of a round that is over
                if report.kind is ReportKind.STARTED:
                    worker.pid = report.pid
                    self._progress.worker_started(worker.rank, report.pid)
                elif report.kind is ReportKind.STOPPED:
                    self._workers.stopped(worker, self._state.round, time.monotonic())
                    self._stuck_ranks.stopped(worker.rank, time.monotonic())
                elif report.kind is ReportKind.CONTINUED:
                    worker.is_stopped = False
                    self._stuck_ranks.continued(worker.rank, time.monotonic())
                elif worker.rank < 0:
                    self._read(worker)
                    self._recovery.lost_standby(worker, report)
                else:
                    self._worker_ended(worker, report)

    def _worker_ended(self, worker: Worker, report: GuardianReport) -> None:
        now = time.monotonic()
        end = worker.exit(report)
        if not end.succeeded:
            self._read_records()
        self._read(worker)  # what it said before it ended counts as before,
        if not end.succeeded and not self._state.group.has_failed:
            self._read_workers()  # also that others can continue
        if worker.error is not None and worker.rank not in self._state.group.errors:
            # It raised before the round began in which it ends.
            self._perform(self._state.worker_reported(worker.rank, worker.error, now))
        if not end.succeeded:
            end = end.__replace__(recorded=self._read_error_file(worker, end))
        error = self._state.group.errors.get(worker.rank)
        if error is not None and error.time_s < self._recovery.began_s:
            self._state.worker_was_lost(worker.rank)
        if error is not None and self._job.logs.are_kept:
            worker.keep_error(error)
            end = end.__replace__(error_file=worker.error_file)
        end = self._state.group.completed(end)
        self._progress.worker_ended(end)
        self._perform(self._state.worker_exited(end, now))

    def _read_error_file(self, worker: Worker, end: WorkerExit) -> str | None:
        """For workers that do not report over the control socket, and for our own caller."""
        text = worker.recorded()
        if text is not None and worker.rank not in self._state.group.errors:
            from rallypoint.launch.output.failure_report import read_error_file

            error = read_error_file(text, time_s=end.time_s)
            if error is not None:
                self._perform(self._state.worker_reported(worker.rank, error, time.monotonic()))
        return text

    def _read_workers(self) -> None:
        """What they have sent so far, whatever the order of events in this turn."""
        for worker in [*self._workers.by_rank.values()]:
            self._read(worker)

    def _read(self, worker: Worker) -> None:
        messages, is_open = worker.control.receive()
        if not is_open and worker.control in self.selector.get_map():
            self.selector.unregister(worker.control)
        for message in messages:
            if isinstance(message, WorkerError):
                worker.error = message
                if worker.rank < 0:
                    continue
                self._read_records()
                now = time.monotonic()
                self._perform(self._state.worker_reported(worker.rank, message, now))
                self._stuck_ranks.raised(worker.rank, now)
            elif isinstance(message, LongWait | CallTimedOut | LostContact):
                self._stuck_ranks.complains(worker.rank, message)
            elif isinstance(message, WorkerReport):
                self._recovery.heard(worker, message)

    # Actions.

    def _perform(self, decision: NodeDecision) -> None:
        if decision.reason:
            self._progress.decided(self._state.phase.value, decision.reason)
        for action in decision.actions:
            match action:
                case SignalWorkers():
                    self._signal(action)
                case KeepWorkers(ranks, number):
                    self._workers.keep(ranks, number)
                case EndElsewhere():
                    self._stuck_ranks.end_elsewhere(action)
                case EndEverything():
                    self._to_guardian(lambda guardian: guardian.end())
                case PauseEverything():
                    self._workers.pause()
                    self._to_guardian(lambda guardian: guardian.pause())
                case ResumeEverything():
                    self._renew_fence()
                    self._to_guardian(lambda guardian: guardian.resume())
                case Tell(report):
                    self._rounds.tell(report)
                case Notice(text):
                    self._progress.told(text)
                case _:
                    assert_never(action)

    def _signal(self, action: SignalWorkers) -> None:
        if self._step_signals is None:
            self._send_signal(action.ranks, action.signal)
        else:
            self._step_signals.send(action.ranks, action.signal, time.monotonic())

    def _send_signal(self, ranks: Sequence[int], number: int) -> None:
        self._to_guardian(lambda guardian: self._workers.signal(guardian, ranks, number))

    def _renew_fence(self) -> None:
        """Tell the guardian how long workers may run if this process is stopped.

        Those that can continue in the next round are paused then, the others killed.
        """
        until = self._rounds.fence_at
        pauses = until is not None and bool(self._state.survivors)
        if (until, pauses) != self._fence:
            self._fence = until, pauses
            self._to_guardian(lambda guardian: guardian.fence(until, pauses=pauses))

    def _watch_guardian(self) -> None:
        guardian = self._guardian
        if guardian is None or guardian.has_unsent == self._writes_to_guardian:
            return
        if guardian in self.selector.get_map():
            self._writes_to_guardian = guardian.has_unsent
            events = selectors.EVENT_READ
            events |= selectors.EVENT_WRITE if self._writes_to_guardian else 0
            self.selector.modify(guardian, events, self._guardian_spoke)

    def _to_guardian(self, request: Callable[[Guardian], None]) -> None:
        if self._guardian is None:
            return
        try:
            request(self._guardian)
        except GuardianLostError:
            self._perform(self._state.guardian_lost())


def _step_signals(job: Job, send: Callable[[tuple[int, ...], int], None]) -> StepSignals | None:
    """What prevents signalling workers twice; None: no one else signals them."""
    if not job.environ.get("SLURM_JOB_ID"):
        return None
    from rallypoint.launch.agent.step_signals import StepSignals

    try:
        return StepSignals(send)
    except OSError:  # better twice than never
        return None


def fill_standard_descriptors() -> None:
    """If one of 0, 1 and 2 is closed, workers would get a descriptor of ours there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
