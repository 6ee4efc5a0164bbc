"""What one node's agent does and reports when a worker ends or fails, or must stop.

Events and `now` go in, actions and their reason come out: no clock, process or descriptor here. The
coordinator decides for all nodes whether the job is restarted.

    WAITING --Start--> RUNNING --failure--> (HOLDING) --> STOPPING --> ENDING --> WAITING, DONE
                          ^ \\--a failure that others outlive--> KEEPING
                          \\--Start---------------------------------/

WAITING: for a round, or for the coordinator's decision after one. HOLDING: for a moment; after a
failure that only reports another rank's death (an *echo*), for that death to show, and after an
exception, for the same one on other ranks, so that it is reported once. STOPPING: workers were
asked to end. KEEPING: the round is over, but workers that said that they can (`elastic`) run on,
and will be in the next one. ENDING: all remaining processes, including grandchildren, are killed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from rallypoint.base.control_message import WorkerError
from rallypoint.base.record import Record
from rallypoint.base.wording import name_ranks
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup
from rallypoint.rendezvous.job.reports import (
    NOTHING,
    Decision,
    Ending,
    Finish,
    NodeReport,
    Notice,
    Outcome,
    RankFailure,
    Stop,
)

SIGINT, SIGKILL, SIGTERM, SIGCONT = 2, 9, 15, 18
# Exit statuses, beside 128 + a signal's number and a command line's 2: docs/exit-statuses.md.
SUCCEEDED, FAILED, NOTHING_RAN = 0, 1, 3
ECHO_GRACE_S = 0.3
FOLD_GRACE_S = 0.1
MAX_FOLD_GRACE_S = 1.0
TELL_AFTER_S = 1.0  # workers that are still there this long after they were asked to end are named
# The guardian gives up on what it cannot kill after 5 s; one that is silent for longer hangs.
GUARDIAN_PATIENCE_S = 8.0


class Phase(Enum):
    """What the agent is doing."""

    WAITING = "waiting"
    RUNNING = "running"
    HOLDING = "holding"
    KEEPING = "keeping"
    STOPPING = "stopping"
    ENDING = "ending"
    DONE = "done"


_MOVES: dict[Phase, tuple[Phase, ...]] = {
    Phase.WAITING: (Phase.RUNNING, Phase.DONE),
    Phase.RUNNING: (Phase.HOLDING, Phase.KEEPING, Phase.STOPPING, Phase.ENDING, Phase.DONE),
    Phase.HOLDING: (Phase.KEEPING, Phase.STOPPING, Phase.ENDING, Phase.DONE),
    Phase.KEEPING: (Phase.RUNNING, Phase.STOPPING, Phase.ENDING, Phase.DONE),
    Phase.STOPPING: (Phase.ENDING, Phase.DONE),
    Phase.ENDING: (Phase.WAITING, Phase.DONE),
    Phase.DONE: (),
}


_WORKERS_RUN = (Phase.RUNNING, Phase.HOLDING, Phase.KEEPING)


class SignalWorkers(Record):
    """Send `signal` to the process groups of these ranks."""

    ranks: tuple[int, ...]
    signal: int


class EndElsewhere(Record):
    """Have this rank's agent kill it: the others continue without it."""

    rank: int
    round: int
    because: str


class KeepWorkers(Record):
    """Tell these ranks that they are to be in the round after that one."""

    ranks: tuple[int, ...]
    round: int


class EndEverything(Record):
    """Kill every process below the guardian; the answer is `everything_ended`."""


class PauseEverything(Record):
    """Stop every process below the guardian."""


class ResumeEverything(Record):
    """Let them run again."""


class Tell(Record):
    """Tell the coordinator how it is."""

    report: NodeReport


NodeAction = (
    SignalWorkers
    | EndElsewhere
    | KeepWorkers
    | EndEverything
    | PauseEverything
    | ResumeEverything
    | Tell
    | Notice
)
NodeDecision = Decision[NodeAction]


class NodeState:
    """One node of a job. Each method takes one event and returns one `Decision`."""

    def __init__(self, *, shutdown_timeout_s: float, node_rank: int = 0) -> None:
        self.phase = Phase.WAITING
        self.finish: Finish | None = None
        self.stop_signal: int | None = None
        self.unkillable: tuple[int, ...] = ()
        self.guardian_lost_because = ""
        self.is_paused = False  # nothing runs here until the next round
        self.ready = 0  # workers on standby, which can take the places of lost ones
        self._stop_asked = self._leaves = ""  # why this node asks for that
        self._kept: frozenset[int] = frozenset()  # which the coordinator expects in the next round
        # When to call `tick` at the latest; None: only events matter.
        self.wake_at: float | None = None
        self._shutdown_timeout_s = shutdown_timeout_s
        self._hold_until = 0.0
        self._stop_until = 0.0
        self._ordered_until = 0.0  # the order to stop has only just come from another node
        self._begin(-1, node_rank, WorkerGroup(()))

    def _begin(self, round_number: int, node_rank: int, group: WorkerGroup) -> None:
        """Set all that belongs to one round: nothing of the one before is left."""
        self.round = round_number
        self.node_rank = node_rank  # in this round, or the one that it expects
        self.group = group
        self.elastic: set[int] = set()  # the ranks that continue when others are lost
        self.stopped_because = ""  # what another node reported of this round
        self.hang = ""  # what was reported of this round, if it was ended for that
        self.broken_at: float | None = None  # when this node knew that the round was over
        self._broken = ""  # why the round can no longer succeed
        self._hang_cause: RankFailure | None = None
        self._reported_ready = 0
        self._is_finishing = False  # a worker has done its last update
        self._newcomers: frozenset[int] = frozenset()  # ranks that joined with this round
        self._missed: set[int] = set()  # ranks that were lost before the round that expected them

    # Orders.

    def started(
        self,
        round_number: int,
        ranks: range,
        node_rank: int = 0,
        *,
        local_ranks: Mapping[int, int] | None = None,
        elastic: Iterable[int] = (),
        newcomers: Iterable[int] = (),
    ) -> NodeDecision:
        """A round begins with these ranks on this node.

        Args:
            local_ranks: by rank, if they are not 0, 1, ...
            elastic: the ranks of workers that continue.
            newcomers: the ranks of those that were on standby.
        """
        if self.phase in (Phase.STOPPING, Phase.ENDING):
            self.round = round_number  # it ends with what is being ended
            if not self.group.local_ranks:  # no worker had a rank: that is no success of this round
                self.group = WorkerGroup(ranks, local_ranks)
        if self.phase not in (Phase.WAITING, Phase.KEEPING):
            return NOTHING
        self._move(Phase.RUNNING)
        self._begin(round_number, node_rank, WorkerGroup(ranks, local_ranks))
        self.elastic, self._newcomers = set(elastic), frozenset(newcomers)
        self.group.started()
        self.is_paused = False
        resume = ResumeEverything()  # the guardian may have paused by itself what has ended since
        reason = f"round {round_number} with {len(ranks)} workers here"
        if ranks:
            return Decision((resume,), reason)
        self._move(Phase.KEEPING)  # what is to be here is on standby, or is not ready yet
        return Decision((resume, self._tell()), reason)

    def round_stopped(self, stop: Stop, now: float) -> NodeDecision:
        """The coordinator ends the round on all nodes, or this node has lost it."""
        if stop.round != self.round:
            return NOTHING
        is_urgent = stop.ending in (Ending.KILL, Ending.PAUSE)
        if stop.ending is Ending.ADMIT and self._is_finishing:  # it crosses this node's report
            return Decision((), f"{stop.because}, but workers here have done their last update")
        if stop.ending is Ending.PAUSE and self.survivors and self.phase in _WORKERS_RUN:
            return self._pause(stop.because, now)
        if self.phase in (Phase.RUNNING, Phase.HOLDING):
            self._stopped(stop.because, now)
            if not is_urgent:
                keeps = bool(self.survivors)
                return self._keep(stop.because) if keeps else self._stop(SIGTERM, stop.because, now)
        elif self.phase not in (Phase.STOPPING, Phase.KEEPING) or not is_urgent:
            return NOTHING
        self.group.stopping()
        return self._end(stop.because, now)

    def finished(self, finish: Finish, now: float) -> NodeDecision:
        """The job is over: at once if nothing is running here, else as soon as that has ended."""
        if self.phase is Phase.DONE:
            return NOTHING
        self.finish = self.finish or finish
        if self.phase is Phase.WAITING:
            return self._done(finish.because)
        if self.phase in _WORKERS_RUN:
            self._ordered_until = now + TELL_AFTER_S
            return self._stop(SIGTERM, finish.because, now)
        return NOTHING

    # Events.

    def worker_is_elastic(self, rank: int, *, is_on: bool) -> NodeDecision:
        """A worker reports whether it continues when others are lost."""
        if is_on and rank in self.group.running:
            self.elastic.add(rank)
        elif rank in self.elastic:
            self.elastic.discard(rank)
            if not self._is_finishing:
                self._is_finishing = True
                return Decision((self._tell(),), "the last update is done")
        return NOTHING

    def workers_ready(self, ready: int) -> NodeDecision:
        """So many workers on standby wait for a place."""
        self.ready = ready
        if ready == self._reported_ready or self.phase not in (Phase.RUNNING, Phase.KEEPING):
            return NOTHING
        self._reported_ready = ready
        return Decision((self._tell(),), f"{ready} workers on standby")

    def worker_reported(self, rank: int, error: WorkerError, now: float) -> NodeDecision:
        """A worker reports the exception that is ending it."""
        if rank not in self.group.running:
            return NOTHING
        self.group.reported(rank, error)
        if self.phase is Phase.HOLDING and not error.is_secondary:
            self._hold(now + FOLD_GRACE_S)
        return NOTHING

    def worker_exited(self, end: WorkerExit, now: float) -> NodeDecision:
        """A worker has ended, or could not be started."""
        if end.rank not in self.group.running:
            return NOTHING
        if end.code == 0 and end.rank in self.elastic - self.group.stopped:
            end = end.__replace__(is_early=True)
        end = self.group.exited(end)
        if not end.succeeded:
            self._breaks(now)
        match self.phase:
            case Phase.RUNNING | Phase.HOLDING if not end.succeeded:
                return self._failed(end, now)
            case Phase.RUNNING | Phase.HOLDING | Phase.STOPPING if not self.group.running:
                return self._end("all workers have ended", now)
            case Phase.KEEPING if end.rank in self.elastic:
                return Decision((self._tell(),), f"rank {end.rank} does not continue")
        return NOTHING

    def worker_was_lost(self, rank: int) -> None:
        """What ends this worker is older than the round, which is not to be charged for it."""
        self._missed.add(rank)

    def worker_missed(self, rank: int, end: WorkerExit, now: float) -> NodeDecision:
        """A worker that was to continue in this round, as that rank, had ended before it began."""
        self.worker_was_lost(rank)
        return self.worker_exited(end.__replace__(rank=rank, is_early=end.code == 0), now)

    def stop_requested(
        self, signal: int, text: str, now: float, *, leaves: bool = False
    ) -> NodeDecision:
        """A signal, described by `text`, asks the agent to stop the job, or its own part."""
        if self.phase is Phase.DONE:
            return NOTHING
        first, self.stop_signal = self.stop_signal is None, self.stop_signal or signal
        # A Ctrl-C that all nodes get may come here behind the word of one that had it before.
        is_same = first and now < self._ordered_until
        stop: NodeDecision = Decision((), text)  # no new round
        if self.phase is Phase.STOPPING and signal == SIGINT and not is_same:
            stop = self._end("interrupted while the workers were stopping", now)
        elif not first:
            return NOTHING
        elif self.phase in _WORKERS_RUN:
            stop = self._stop(signal, text, now)
        if leaves:
            self._leaves = self._leaves or text
        else:
            self._stop_asked = self._stop_asked or text
        if self.phase is Phase.WAITING:
            self.finish = self.finish or Finish(outcome=Outcome.STOPPED, because=text)
            self._done(text)
        return Decision((*stop.actions, self._tell()), stop.reason)

    def hangs(self, text: str, rank: int, now: float, *, ends_job: bool = False) -> NodeDecision:
        """The job hung, as `text` says, and the round must fail or the job end for it.

        `rank` is the rank at fault, if any.
        """
        if not self.is_under_way:
            return NOTHING
        if not ends_job and (self.survivors - {rank} or not self.group.running):
            reason = f"{text}; others continue"
            if rank in self.group.running:
                self.group.killing(rank, text)
                return Decision((SignalWorkers((rank,), SIGKILL),), reason)
            return Decision((EndElsewhere(rank, self.round, text),), reason)
        self.hang = self.stopped_because = text
        stop = self._stop(SIGTERM, text, now)
        if ends_job:
            self._stop_asked = self._stop_asked or f"stopped, because {text}"
        else:
            # Whatever fails while it is being ended came later.
            self._hang_cause = RankFailure(rank=rank, node_rank=self.node_rank, text=text)
            self._broken = self._broken or text
        return Decision((*stop.actions, self._tell()), stop.reason)

    def calls_timed_out(self, at_fault: Iterable[int]) -> NodeDecision:
        """Calls of the job timed out as these ranks did not come; none: all have come by now."""
        because = "others waited for it longer than their group's timeout"
        text = "calls timed out, but all ranks take part again"
        return self._end_at_fault(at_fault, because, otherwise=text)

    def contact_lost(self, at_fault: Iterable[int]) -> NodeDecision:
        """Ranks cannot reach each other; without these they could; none: all shall try again."""
        because = "others could not reach it"
        text = "connections between ranks broke; all connect again"
        return self._end_at_fault(at_fault, because, otherwise=text)

    def end_rank(self, rank: int, round_number: int, because: str) -> NodeDecision:
        """The coordinator's agent has found that others must continue without this rank."""
        is_current = round_number == self.round and self.phase in (Phase.RUNNING, Phase.HOLDING)
        if not is_current or rank not in self.group.running:
            return NOTHING
        self.group.killing(rank, because)
        text = f"killing rank {rank}, as {because}; the others continue"
        return Decision((Notice(text), SignalWorkers((rank,), SIGKILL)), text)

    def tick(self, now: float) -> NodeDecision:
        """Time has passed."""
        if self.wake_at is None or now < self.wake_at:
            return NOTHING
        self.wake_at = None
        match self.phase:
            case Phase.HOLDING:
                others_go_on = Decision(self._breaks_round(), "a rank failed, and others continue")
                return others_go_on if self.survivors else self._stop(SIGTERM, "a rank failed", now)
            case Phase.STOPPING if now < self._stop_until:
                self.wake_at = self._stop_until
                return Decision((Notice(self._timeouts(now)),), "not all workers have ended yet")
            case Phase.STOPPING:
                return self._end(
                    f"{len(self.group.running)} workers were still running "
                    f"{self._shutdown_timeout_s:g} s after they were asked to end",
                    now,
                )
            case Phase.ENDING:
                return self.guardian_lost(
                    f"did not answer for {GUARDIAN_PATIENCE_S:g} s, and was killed"
                )
        return NOTHING

    def everything_ended(self, unkillable: tuple[int, ...]) -> NodeDecision:
        """The guardian has killed and reaped all processes, except for these."""
        if self.phase is not Phase.ENDING:
            return NOTHING
        self.unkillable = unkillable
        self.group.ended()
        self.is_paused = False
        self._move(Phase.WAITING)
        self.wake_at = None
        reason = "the others are stuck" if unkillable else "nothing is left running"
        self.ready = 0
        tell = self._tell()
        if self.finish is not None:
            self._done(self.finish.because)
        return Decision((tell,), reason)

    def guardian_lost(self, because: str = "was killed") -> NodeDecision:
        """The guardian died, and with it all workers."""
        if self.phase is Phase.DONE:
            return NOTHING
        self.guardian_lost_because = because
        return self._done(f"the guardian process {because}")

    # Verdicts.

    @property
    def status(self) -> int:
        """The launcher's exit status: 0 only if every worker succeeded, and some ran here."""
        if self.guardian_lost_because or self.finish is None:
            return FAILED
        match self.finish.outcome:
            case Outcome.SUCCEEDED:
                return SUCCEEDED
            case Outcome.MISSED:
                return NOTHING_RAN
            case Outcome.STOPPED if self.stop_signal is not None:
                return 128 + self.stop_signal
        return FAILED

    @property
    def report(self) -> NodeReport:
        """All that the coordinator is to know."""
        is_over = self.phase in (Phase.WAITING, Phase.KEEPING, Phase.DONE)
        has_none = self.phase is Phase.KEEPING and not self.group.local_ranks
        return NodeReport(
            round=self.round,
            has_begun=self.round >= 0,
            is_over=is_over,
            broken=self._broken,
            is_finishing=self._is_finishing,
            ready=self.ready,
            survivors=len(self.survivors) if self.phase is Phase.KEEPING else 0,
            waits=self.phase is Phase.KEEPING,
            succeeded=has_none or (is_over and self.group.succeeded),
            causes=self._causes() if is_over else (),
            unkillable=len(self.unkillable),
            stop_asked=self._stop_asked,
            leaves=self._leaves,
        )

    def _tell(self) -> Tell:
        return Tell(self.report)

    def _causes(self) -> tuple[RankFailure, ...]:
        failures = tuple(self._cause(failure) for failure in self.group.failures())
        return (self._hang_cause, *failures) if self._hang_cause is not None else failures

    def _cause(self, failure: WorkerExit) -> RankFailure:
        return RankFailure(
            rank=failure.rank,
            node_rank=self.node_rank,
            text=failure.text,
            is_secondary=failure.is_secondary,
            is_startup=failure.is_startup,
            is_charged=failure.rank in self._missed,
            is_newcomer=failure.rank in self._newcomers,
        )

    # Moves.

    def _failed(self, failure: WorkerExit, now: float) -> NodeDecision:
        rank = failure.rank
        if not self.group.running:
            return self._end(f"rank {rank} failed and no other worker is running here", now)
        if self.survivors and (failure.error is None or failure.is_secondary):
            self.wake_at = None
            return Decision(self._breaks_round(), f"rank {rank} failed, and others continue")
        if failure.error is None:
            return self._stop(SIGTERM, f"rank {rank} failed", now)
        grace_s = ECHO_GRACE_S if failure.is_secondary else FOLD_GRACE_S
        if self.phase is Phase.HOLDING:
            if not failure.is_secondary:
                self._hold(now + grace_s)
            return NOTHING
        self._move(Phase.HOLDING)
        self._hold_until = now + MAX_FOLD_GRACE_S
        self._hold(now + grace_s)
        if failure.is_secondary:
            return Decision((), f"rank {rank} lost a peer; waiting for the rank that failed first")
        return Decision((), f"rank {rank} failed; waiting for others that fail in the same way")

    @property
    def is_under_way(self) -> bool:
        """Whether the round continues, even if all its workers are on other nodes."""
        return self.phase is Phase.RUNNING or (
            self.phase is Phase.KEEPING and not self.group.local_ranks
        )

    @property
    def survivors(self) -> set[int]:
        """The running workers that continue when others are lost."""
        return self.group.running & self.elastic

    @property
    def lost_while_kept(self) -> list[WorkerExit]:
        """Workers that the coordinator expects in the next round, and that have ended since."""
        return [self.group.exits[rank] for rank in sorted(self._kept & self.group.exits.keys())]

    def _end_at_fault(
        self, at_fault: Iterable[int], because: str, *, otherwise: str
    ) -> NodeDecision:
        """Without these ranks the others can continue; none: all do in a new round, `otherwise`."""
        if not self.is_under_way:
            return NOTHING
        decided: NodeDecision = NOTHING
        for rank in at_fault:
            if rank in self.group.running:
                decided += self.end_rank(rank, self.round, because)
            else:
                decided += Decision((EndElsewhere(rank, self.round, because),), because)
        if decided == NOTHING:
            self._broken = self._broken or otherwise
            return Decision((self._tell(),), otherwise)
        return decided

    def _keep(self, because: str) -> NodeDecision:
        """The round is over: workers that can continue do so, and the others are killed."""
        self._move(Phase.KEEPING)
        self.wake_at = None
        rest = tuple(sorted(self.group.running - self.elastic))
        self.group.stopped.update(rest)
        self._kept = frozenset(self.survivors)
        keep = KeepWorkers(tuple(sorted(self._kept)), self.round)
        decided: NodeDecision = Decision((self._tell(), keep), because)
        if rest:
            who = f"{name_ranks(rest)}: not under elastic.run, or without the others' state yet"
            notice = Notice(f"{because}; killing {who}")
            decided = Decision((SignalWorkers(rest, SIGKILL), *decided.actions, notice), because)
        return decided

    def _pause(self, because: str, now: float) -> NodeDecision:
        """Others may continue without this node. If they do not, its workers have lost nothing."""
        decided: NodeDecision = NOTHING
        if self.phase is not Phase.KEEPING:
            self._stopped(because, now)
            decided = self._keep(because)
        self.is_paused = True
        notice = Notice(f"{because}; pausing the workers of this node until the job continues")
        return decided + Decision((PauseEverything(), notice), because)

    def _stopped(self, because: str, now: float) -> None:
        """The round is over for a reason that does not lie here."""
        self.stopped_because = because
        self._breaks(now)
        self._ordered_until = now + TELL_AFTER_S

    def _breaks(self, now: float) -> None:
        self.broken_at = now if self.broken_at is None else self.broken_at

    def _hold(self, until: float) -> None:
        self.wake_at = min(until, self._hold_until)

    def _stop(self, signal: int, reason: str, now: float) -> NodeDecision:
        self._move(Phase.STOPPING)
        self.group.stopping()
        self._stop_until = now + self._shutdown_timeout_s
        self.wake_at = now + min(self._shutdown_timeout_s, TELL_AFTER_S)
        ranks = tuple(sorted(self.group.running))
        if not ranks or self.is_paused:  # they must not run, not even to end
            return self._end(reason, now)
        # SIGCONT: a worker that is suspended could not act on the first signal.
        signals = (SignalWorkers(ranks, signal), SignalWorkers(ranks, SIGCONT))
        return Decision((*signals, *self._breaks_round()), reason)

    def _timeouts(self, now: float) -> str:
        return (
            f"waiting up to {self._stop_until - now:.0f} s more for"
            f" {name_ranks(sorted(self.group.running))} to end;"
            f" {'a second' if self.stop_signal == SIGINT else 'an'} interrupt (Ctrl-C) kills them"
        )

    def _end(self, reason: str, now: float) -> NodeDecision:
        report = self._breaks_round() if self.phase in (Phase.RUNNING, Phase.HOLDING) else ()
        self._move(Phase.ENDING)
        self.wake_at = now + GUARDIAN_PATIENCE_S
        return Decision((EndEverything(), *report), reason)

    def _breaks_round(self) -> tuple[Tell, ...]:
        failures = self.group.failures()
        if not failures:
            return ()
        if not (self._stop_asked or self._leaves):  # else that ends the round
            self._broken = self._broken or f"node {self.node_rank}: {failures[0].text}"
        return (self._tell(),)

    def _done(self, reason: str) -> NodeDecision:
        self._move(Phase.DONE)
        self.wake_at = None
        return Decision((), reason)

    def _move(self, to: Phase) -> None:
        if to not in _MOVES[self.phase]:
            raise RuntimeError(f"an agent cannot go from {self.phase.value} to {to.value}")
        self.phase = to
