"""How a round or a job ended: what an agent prints of it, and returns to a Python program."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rallypoint.base.record import Record
from rallypoint.base.wording import brief
from rallypoint.launch.agent.node import NodeState
from rallypoint.launch.agent.round_evidence import OomKills
from rallypoint.launch.job import Job
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup, signal_name
from rallypoint.rendezvous.job.reports import Finish, Outcome


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

    def of_job(
        self,
        *,
        stopped_by: str,
        calls: Callable[[bool], list[str]],
        hint: Callable[[int | None], str],
    ) -> list[str]:
        """The job is over; no lines if it succeeded.

        Args:
            stopped_by: who stopped it, if it was not a signal.
            calls: lines on the calls that the workers were in; for a stopped job, if it should
                report them.
            hint: where the output of a local rank is kept.
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
            lines.append(self._given_up(finish, calls(False), hint))
        elif finish is not None and finish.outcome is Outcome.STOPPED:
            after_s = time.monotonic() - self._began
            if state.stop_signal is None:
                lines.append(f"{finish.because}, after {brief(after_s)}")
            else:
                by = stopped_by or signal_name(state.stop_signal)
                lines.append(f"stopped by {by} after {brief(after_s)}")
            lines += calls(True)
        elif finish is not None and finish.outcome is Outcome.MISSED:
            lines.append(f"the job ended before this node had a place in it: {finish.because}")
        if state.unkillable:
            pids = ", ".join(map(str, state.unkillable))
            lines.append(
                f"cannot kill process {pids}: it is stuck in the kernel or belongs to another "
                "user; left running"
            )
        if finish is not None and finish.outcome is Outcome.GIVEN_UP:
            lines += self._leave_error()
        return lines

    def _given_up(
        self, finish: Finish, calls: Sequence[str], hint: Callable[[int | None], str]
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

    def _summary(self, group: WorkerGroup, *, calls: Sequence[str], **report: str) -> str:
        from rallypoint.launch.output.failure_report import summary

        host, oom_kills = self._job.host, self._oom_kills.new
        return summary(group, host=host, oom_kills=oom_kills, calls=calls, **report)
