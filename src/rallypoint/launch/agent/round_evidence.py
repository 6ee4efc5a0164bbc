"""What an agent remembers of a round in which something went wrong, for its reports.

At the first sign of trouble it reads the workers' flight records, before the workers react. If
someone ends a job in which workers have waited for long, it also inspects where they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from rallypoint.base.cgroup_limits import count_oom_kills
from rallypoint.launch.job import Job
from rallypoint.launch.output.flight_report import FlightRecords
from rallypoint.launch.worker_group import WorkerExit, WorkerGroup, signal_name
from rallypoint.rendezvous.job.round import Seat

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from rallypoint.diagnosis.facts import Facts, WorkerEnd
    from rallypoint.launch.inspection.inspect_node import ProcessSnapshot

_LONG_S = 1.0  # an operation that took longer is worth a word when somebody stops the job
_FORMING_S = 3.0  # so long a job may have no group


class RoundEvidence:
    """What is remembered of one round.

    Attributes:
        records: the memory that its workers write.
    """

    def __init__(self, workers: int, records: FlightRecords | None = None) -> None:
        """Begin; `records` is the memory of workers that go on."""
        self.records = records or FlightRecords(workers)
        self._began = time.monotonic()
        self._whereabouts: Mapping[int, ProcessSnapshot] = {}  # by rank

    def renewed(self) -> RoundEvidence:
        """For a round in which workers of this one go on."""
        self.records.forget()
        return RoundEvidence(0, self.records)

    def look_closely(self, pids: Mapping[int, int]) -> None:
        """Someone ends the job: record where workers are, if any waits for long."""
        forms = not self.records.has_groups and time.monotonic() - self._began > _FORMING_S
        if self._whereabouts or not (forms or self.records.lines(least_s=_LONG_S)):
            return
        from rallypoint.launch.inspection.inspect_node import look_where

        try:
            self._whereabouts = {pids[pid]: found for pid, found in look_where(pids).items()}
        except Exception:  # the job is to end, whatever can be learnt of it
            return

    def lines(self, *, was_stopped: bool = False) -> list[str]:
        """The workers' calls, as lines; for a job that was stopped, only if they were long."""
        told = self.records.lines(least_s=_LONG_S if was_stopped else 0.0)
        return [f"  {line}" for line in told]

    def why(self, job: Job, seat: Seat, group: WorkerGroup) -> str:
        """Why a job that someone ended was hanging, if it was, and ran on this node only."""
        if not self._whereabouts or seat.nodes > 1:
            return ""
        from rallypoint.diagnosis.answer import explanation_of
        from rallypoint.diagnosis.explanation import Verdict

        try:
            facts = self._facts(job, seat, group)
            found = explanation_of(facts, facts)
        except Exception:  # how the launcher ends does not depend on it
            return ""
        return found.sentence if found.kind is Verdict.EXPLAINED else ""

    def keep(
        self,
        job: Job,
        seat: Seat,
        group: WorkerGroup,
        *,
        oom_kills: int | None,
        status: int,
        hang: str,
    ) -> None:
        """Save it for `rallypoint explain`, if there is any.

        Args:
            oom_kills: the number of out-of-memory kills since the job began, if known.
            status: the launcher's exit status.
            hang: the hang for which the launcher ended the job, as it was reported.
        """
        if not self.records.seen_ns:
            return
        from rallypoint.launch.inspection.saved_job import KeptJob, keep

        try:
            ended = KeptJob(
                run_id=job.run_id,
                pid=os.getpid(),
                command=job.command,
                ended=time.time(),
                status=status,
                hang=hang,
                facts=self._facts(job, seat, group, oom_kills),
            )
            keep(ended)
        except Exception:  # how the launcher ends does not depend on it
            return

    def _facts(
        self, job: Job, seat: Seat, group: WorkerGroup, oom_kills: int | None = None
    ) -> Facts:
        """All of this node: calls as seen at the first sign of trouble, ends as known now."""
        from rallypoint.diagnosis.facts import Facts, Node, WorkerFacts
        from rallypoint.launch.inspection.inspect_node import ProcessSnapshot
        from rallypoint.launch.inspection.python_stacks import Answer

        not_looked = ProcessSnapshot(None, Answer((), "the job has ended"))
        workers = []
        for rank, local_rank in group.local_ranks.items():
            where, groups = self._whereabouts.get(rank, not_looked), self.records.groups_of(rank)
            workers.append(
                WorkerFacts(
                    rank=rank,
                    local_rank=local_rank,
                    process=where.process,
                    end=_end_of(group.exits.get(rank)),
                    groups=groups,
                    has_record=bool(groups),
                    stacks=where.answer.stacks,
                    no_stacks_because=where.answer.because,
                    library=where.answer.library,
                    gil=where.answer.gil,
                )
            )
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
