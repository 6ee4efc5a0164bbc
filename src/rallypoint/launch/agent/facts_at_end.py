"""What an agent knows of its workers when the job has failed, as facts. Imported only then.

The calls are those seen at the first sign of trouble; the workers' ends were observed later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from rallypoint.diagnosis.facts import Facts, Node, WorkerEnd, WorkerFacts
from rallypoint.launch.inspection.kept import KeptJob
from rallypoint.launch.inspection.look import Whereabouts
from rallypoint.launch.inspection.python_stacks import Answer
from rallypoint.launch.job import Job
from rallypoint.launch.output.flight_report import FlightRecords
from rallypoint.launch.worker_group import WorkerGroup, signal_name
from rallypoint.rendezvous.job.round import Seat

_NOT_LOOKED = Whereabouts(None, Answer((), "the job has ended"))


def job_at_end(
    job: Job,
    seat: Seat,
    group: WorkerGroup,
    records: FlightRecords,
    whereabouts: Mapping[int, Whereabouts],
    *,
    oom_kills: int | None,
    status: int,
    hang: str,
) -> KeptJob:
    """All facts of this node.

    Args:
        records: of the latest round, already read.
        whereabouts: of the workers at that time, by rank, if they were inspected.
        oom_kills: the number of out-of-memory kills since the job began, if known.
        status: the launcher's exit status.
        hang: the hang for which the launcher ended the job, as it was reported.
    """
    now_ns = records.seen_ns
    workers = []
    for rank, local_rank in group.local_ranks.items():
        end = group.exits.get(rank)
        where = whereabouts.get(rank, _NOT_LOOKED)
        told = None
        # A worker that was stopped, or only lost a peer, was still alive at that time.
        if end is not None and (end.succeeded or (end.failed and not end.is_echo)):
            ago_s = time.time() - end.time_s
            told = WorkerEnd(
                code=end.code,
                signal=signal_name(end.signal) if end.signal else "",
                error=end.what if end.failed and end.error else "",
                ended_ns=time.monotonic_ns() - int(ago_s * 1e9),
            )
        workers.append(
            WorkerFacts(
                rank=rank,
                local_rank=local_rank,
                process=where.process,
                end=told,
                groups=records.groups_of(rank),
                has_record=bool(records.groups_of(rank)),
                stacks=where.answer.stacks,
                no_stacks_because=where.answer.because,
                library=where.answer.library,
                gil=where.answer.gil,
            )
        )
    node = Node(
        node_rank=seat.node_rank,
        host=job.host,
        now_ns=now_ns,
        ranks=tuple(group.local_ranks),
        workers=tuple(workers),
        oom_kills=oom_kills,
    )
    return KeptJob(
        run_id=job.run_id,
        pid=os.getpid(),
        command=job.command,
        ended=time.time(),
        status=status,
        hang=hang,
        facts=Facts(
            run_id=job.run_id, round=seat.number, world_size=seat.world_size, nodes=(node,)
        ),
    )
