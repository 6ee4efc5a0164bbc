"""How a round or a job ended: what an agent remembers of it, prints, saves, and returns.

At the first sign of trouble it reads the workers' flight records, before the workers react. If
someone ends a job in which workers have waited for long, it also inspects where they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from signal import SIGABRT

from rallypoint.base.cgroup_limits import count_oom_kills
from rallypoint.base.record import Record
from rallypoint.base.wording import brief, how_ended
from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.job import Job
from rallypoint.launch.output.flight_report import FlightRecords
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup, signal_name
from rallypoint.rendezvous.job.reports import Finish, Outcome
from rallypoint.rendezvous.job.round import Seat

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.diagnosis.facts import Facts, WorkerEnd
    from rallypoint.launch.inspection.inspect_node import ProcessSnapshot
    from rallypoint.launch.output.progress import JobEvents
    from rallypoint.launch.output.streams import Output

_LONG_S = 1.0  # an operation that took longer is reported when a user stops the job
_FORMING_S = 3.0  # a job may have no group for this long


class JobResult(Record, kw_only=True):
    """How a job ended, as one node's agent saw it.

    Attributes:
        status: the launcher's exit status.
        ranks: of this node's workers in the last round.
        failures: of those that failed in it, the root cause first.
    """

    status: int
    ranks: range = range(0)
    failures: tuple[WorkerExit, ...] = ()


class Reports:
    """The reports of one agent, as lines.

    Args:
        began: when the job began (time.monotonic).
    """

    def __init__(self, job: Job, state: NodeState, oom_kills: OomKills, began: float) -> None:
        self._job, self._state, self._oom_kills = job, state, oom_kills
        self._began = began

    def of_round(
        self, number: int, group: WorkerGroup, *, because: str, elsewhere: str, calls: Sequence[str]
    ) -> str:
        """A round is over, and another one begins.

        Args:
            because: what comes next, and why.
            elsewhere: the reason from other nodes, or from the agent.
            calls: lines on the calls that the workers were in.
        """
        if group.failures():
            title = f"round {number} failed"
            return self._summary(
                group, title=title, because=because, elsewhere=elsewhere, calls=calls
            )
        text = f"round {number} ended: {elsewhere or because}"  # not here
        return text + f"; {because}" * (because not in text)

    def calls(self, evidence: RoundEvidence | None, *, was_stopped: bool = False) -> list[str]:
        """The calls that the workers were in."""
        state = self._state
        if evidence is None:
            return []
        return evidence.lines(state.group, was_stopped=was_stopped, hang=state.hang)

    def of_job(
        self,
        evidence: RoundEvidence | None,
        *,
        stopped_by: str,
        hint: Callable[[int | None], str],
        stderr_of: Callable[[int], str],
    ) -> list[str]:
        """The job is over; no lines if it succeeded.

        Args:
            stopped_by: what stopped it, if it was not a signal.
            hint: where the output of a local rank is kept.
            stderr_of: the end of what a local rank wrote to stderr.
        """
        state, finish = self._state, self._state.finish
        lines = []
        if state.guardian_lost_because:
            lines.append(
                f"job failed: the launcher's guardian process {state.guardian_lost_because},"
                " and all workers died with it; look for the out-of-memory killer in the kernel's"
                " log (dmesg)"
            )
        elif finish is not None and finish.outcome is Outcome.GIVEN_UP:
            aborted = self._aborted(evidence, stderr_of)
            lines.append(self._given_up(finish, self.calls(evidence), hint, aborted))
        elif finish is not None and finish.outcome is Outcome.STOPPED:
            after_s = time.monotonic() - self._began
            if state.stop_signal is None:
                lines.append(f"{finish.because}, after {brief(after_s)}")
            else:
                by = stopped_by or signal_name(state.stop_signal)
                lines.append(f"stopped by {by} after {brief(after_s)}")
            lines += self.calls(evidence, was_stopped=True)
        elif finish is not None and finish.outcome is Outcome.MISSED:
            lines.append(f"the job ended before this node could take part: {finish.because}")
        if state.unkillable:
            pids = ", ".join(map(str, state.unkillable))
            lines.append(
                f"cannot kill process {pids}: it is stuck in the kernel or belongs to another "
                "user; left running"
            )
        if finish is not None and finish.outcome is Outcome.GIVEN_UP:
            lines += self._leave_error()
        return lines

    def keep_history(
        self,
        seat: Seat | None,
        events: JobEvents,
        output: Output | None,
        *,
        ended: float,
        text: str,
    ) -> None:
        """Leave a file with what has happened; without a place for it, nothing is left.

        Args:
            output: its thread writes the file, and is left alone if the file system hangs.
            ended: when the job ended, in seconds since 1970.
            text: what was reported of its end.
        """
        try:
            from rallypoint.launch.inspection.ended_job import EndedJob, RankEnd, write

            group, steps = self._state.group, events.steps
            job = EndedJob(
                run_id=self._job.run_id,
                pid=os.getpid(),
                host=self._job.host,
                node_rank=self._state.node_rank,
                command=self._job.command,
                ended=ended,
                uptime_s=time.monotonic() - self._began,
                status=self._state.status,
                text=text,
                round=self._state.round,
                nodes=seat.nodes if seat else 0,
                world_size=seat.world_size if seat else 0,
                step=steps.step if steps else None,
                total=steps.total if steps else None,
                ranks=tuple(
                    RankEnd(rank=rank, pid=end.pid, end=_ending(end))
                    for rank, end in sorted(group.exits.items())
                ),
                so_far=events.so_far(),
            )
            since_s = time.time() - time.monotonic()
            samples = [(since_s + at_s, step) for at_s, step in events.samples]
            if output is not None:
                output.files.call(lambda: write(job, samples))
        except Exception:  # how the launcher ends does not depend on it
            return

    def _aborted(
        self, evidence: RoundEvidence | None, stderr_of: Callable[[int], str]
    ) -> list[str]:
        """Why the first worker that failed aborted, as far as is known; empty if it did not."""
        failures = self._state.group.failures()
        if not failures or failures[0].signal != SIGABRT or failures[0].killed_because:
            return []
        from rallypoint.launch.output.failure_report import reason_of_abort

        groups = () if evidence is None else evidence.records.groups_of(failures[0].rank)
        uses_gloo = any(group.backend == "gloo" for group in groups)
        return reason_of_abort(stderr_of(failures[0].local_rank), uses_gloo=uses_gloo)

    def _given_up(
        self,
        finish: Finish,
        calls: Sequence[str],
        hint: Callable[[int | None], str],
        aborted: Sequence[str],
    ) -> str:
        state = self._state
        is_elsewhere = finish.culprit not in (None, state.node_rank)
        failures = state.group.failures()
        culprit = failures[0].local_rank if failures else None
        text = self._summary(
            state.group,
            title="job failed",
            because=finish.because,
            elsewhere=f"node {finish.culprit}: {finish.what}" if is_elsewhere else "",
            calls=calls,
            aborted=aborted,
            logs=hint(culprit),
        )
        # No worker of this node failed; what was wrong then is known if it hung.
        what = f"{state.hang}; {finish.because}" if state.hang else finish.because
        return text or f"job failed: {what}"

    def _leave_error(self) -> list[str]:
        """Write the root cause for the launcher's caller, as torchrun does; lines to print."""
        path = self._job.environ.get("TORCHELASTIC_ERROR_FILE")
        failures = self._state.group.failures()
        if not path or not failures:
            return []
        from rallypoint.launch.child_failure import leave_error

        trouble = leave_error(path, failures[0])
        return [trouble] if trouble else []

    def _summary(
        self,
        group: WorkerGroup,
        *,
        calls: Sequence[str],
        aborted: Sequence[str] = (),
        **report: str,
    ) -> str:
        from rallypoint.launch.output.failure_report import summary

        host, oom_kills = self._job.host, self._oom_kills.new
        return summary(
            group, host=host, oom_kills=oom_kills, calls=calls, aborted=aborted, **report
        )


class RoundEvidence:
    """What is remembered of one round.

    Attributes:
        records: the memory that its workers write.
    """

    def __init__(self, job: Job, seat: Seat, records: FlightRecords) -> None:
        self.records = records
        self._job, self._seat = job, seat
        self._began = time.monotonic()
        self._snapshots: Mapping[int, ProcessSnapshot] = {}  # by rank

    def renewed(self, seat: Seat) -> RoundEvidence:
        """For a round in which workers of this one continue."""
        self.forget()
        return RoundEvidence(self._job, seat, self.records)

    def forget(self) -> None:
        """Drop what was recorded: it belongs to no failure of this round."""
        self.records.forget()
        self._snapshots = {}

    def inspect(self, pids: Mapping[int, int]) -> None:
        """Someone ends the job: record where workers are, if any waits for long."""
        forms = not self.records.has_groups and time.monotonic() - self._began > _FORMING_S
        if self._snapshots or not (forms or self.records.lines(least_s=_LONG_S)):
            return
        from rallypoint.launch.inspection.inspect_node import inspect_briefly

        try:
            self._snapshots = {pids[pid]: found for pid, found in inspect_briefly(pids).items()}
        except Exception:  # the job is to end, whatever can be learnt of it
            return

    def lines(self, group: WorkerGroup, *, was_stopped: bool, hang: str) -> list[str]:
        """The workers' calls, as lines.

        For a job that was stopped, only long ones, and why it hung, if that is not reported yet.
        """
        calls = self.records.lines(least_s=_LONG_S if was_stopped else 0.0)
        why = self._why(group) if was_stopped and not hang else ""
        if why:
            calls = [f"at that time: {why}", *calls]
        return [f"  {line}" for line in calls]

    def _why(self, group: WorkerGroup) -> str:
        """Why a job that someone ended was hanging, if it was, and ran on this node only."""
        if not self._snapshots or self._seat.nodes > 1:
            return ""
        from rallypoint.diagnosis.answer import explanation_of
        from rallypoint.diagnosis.explanation import Verdict

        try:
            facts = self._facts(group)
            found = explanation_of(facts, facts)
        except Exception:  # how the launcher ends does not depend on it
            return ""
        return found.sentence if found.kind is Verdict.EXPLAINED else ""

    def keep(
        self,
        group: WorkerGroup,
        *,
        oom_kills: int | None,
        status: int,
        hang: str,
        logs: str,
        ended: float,
    ) -> None:
        """Save it for `rallypoint explain`, if there is any.

        Args:
            oom_kills: the number of out-of-memory kills since the job began, if known.
            status: the launcher's exit status.
            hang: the hang for which the launcher ended the job, as it was reported.
            logs: the directory of the workers' output; empty if that is not kept.
            ended: when the job ended, in seconds since 1970.
        """
        if not self.records.seen_ns:
            return
        from rallypoint.launch.inspection.saved_job import KeptJob, keep

        try:
            job = KeptJob(
                run_id=self._job.run_id,
                pid=os.getpid(),
                command=self._job.command,
                ended=ended,
                status=status,
                hang=hang,
                failure=_failure_of(group),
                logs=logs,
                facts=self._facts(group, oom_kills),
            )
            keep(job)
        except Exception:  # how the launcher ends does not depend on it
            return

    def _facts(self, group: WorkerGroup, oom_kills: int | None = None) -> Facts:
        """All of this node: calls as seen at the first sign of trouble, ends as known now."""
        from rallypoint.diagnosis.facts import Facts, Node
        from rallypoint.launch.inspection.inspect_node import ProcessSnapshot, worker_facts
        from rallypoint.launch.inspection.python_stacks import Answer

        not_looked = ProcessSnapshot(None, Answer((), "the job has ended"))
        job, seat = self._job, self._seat
        workers = [
            worker_facts(
                rank,
                local_rank,
                self.records.groups_of(rank),
                self._snapshots.get(rank, not_looked),
                _end_of(group.exits.get(rank)),
            )
            for rank, local_rank in group.local_ranks.items()
        ]
        node = Node(
            node_rank=seat.node_rank,
            host=job.host,
            now_ns=self.records.seen_ns,
            ranks=tuple(group.local_ranks),
            workers=tuple(workers),
            oom_kills=oom_kills,
        )
        return Facts(
            run_id=job.run_id, round=seat.number, world_size=seat.world_size, nodes=(node,)
        )


def _failure_of(group: WorkerGroup) -> str:
    """Which rank failed first, and how, as in the launcher's summary; empty if none did."""
    from rallypoint.launch.output.failure_report import ended_before

    failures = group.failures()
    return f"{failures[0].text}{ended_before(group)}" if failures else ""


def _ending(end: WorkerExit) -> str:
    """As those who watch the job see it."""
    if end.by_launcher:
        return "stopped by the launcher"
    return how_ended(end.code, signal_name(end.signal) if end.signal else "")


def _end_of(end: WorkerExit | None) -> WorkerEnd | None:
    from rallypoint.diagnosis.facts import WorkerEnd

    # A worker that was stopped, or only lost a peer, was still alive at the first sign of trouble.
    if end is None or not (end.succeeded or (end.failed and not end.is_secondary)):
        return None
    return WorkerEnd(
        code=end.code,
        signal=signal_name(end.signal) if end.signal else "",
        error=end.what if end.failed and end.error else "",
        ended_ns=time.monotonic_ns() - int((time.time() - end.time_s) * 1e9),
    )


class OomKills:
    """Counts out-of-memory kills."""

    def __init__(self) -> None:
        self._before = count_oom_kills()

    @property
    def new(self) -> int | None:
        """The kills since `reset`; None: the kernel does not report them."""
        now = count_oom_kills()
        return None if self._before is None or now is None else now - self._before

    def reset(self) -> None:
        """Count from now on."""
        self._before = count_oom_kills()
