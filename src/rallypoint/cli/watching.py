"""The common part of commands that watch a running job, `top` and `page`: the first view that says
enough, inspections of a job without progress, and a view as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rallypoint.base.errors import HostError
from rallypoint.base.json_records import to_json
from rallypoint.cli.jobs import JobEndedError, RunningJob
from rallypoint.diagnosis.activity import current_site
from rallypoint.diagnosis.answer import explanation_of
from rallypoint.diagnosis.explanation import Verdict
from rallypoint.diagnosis.job_view import (
    SILENT_S,
    Inspection,
    JobHistory,
    JobView,
    NodeView,
    RankState,
    RankView,
    view_of,
)
from rallypoint.launch.inspection.all_nodes import look_everywhere
from rallypoint.launch.inspection.ended_job import EndedJob
from rallypoint.launch.inspection.entries import Found
from rallypoint.launch.inspection.job_follower import START_S, follow
from rallypoint.launch.inspection.saved_job import kept_jobs

_ONCE_S = START_S + SILENT_S + 0.5  # until then it is known which nodes tell nothing
_MOST_S = 15.0  # this machine may be busy
_BRIEF_S = 0.1
_EXPLAIN_S, _MOST_EXPLAIN_S = 5.0, 60.0


def view_once(job: RunningJob) -> JobView:
    """What is to be seen of a job, once its rates are known, which takes about two seconds.

    Raises:
        JobEndedError: it ends before.
        HostError: it tells nothing.
    """
    began, view = time.monotonic(), None
    for history in follow(job.agents, _briefly):
        past_s = time.monotonic() - began
        is_late = past_s > (_ONCE_S if any(node.updates for node in history.nodes) else _MOST_S)
        if not (is_late or _is_enough(history)):
            continue
        view = view_of(history)
        if view is not None and view.is_stalled:
            view = view_of(history, inspect(job.agents))
            break
        if is_late or (view is not None and not view.is_undecided):
            break
    else:
        raise JobEndedError(f"{job} has ended.")
    if view is None:
        raise HostError(f"{job} has told nothing for {_MOST_S:g} s; it may have ended.")
    return view


def _briefly(descriptors: Sequence[int], timeout_s: float) -> None:
    time.sleep(min(_BRIEF_S, timeout_s))


def _is_enough(history: JobHistory) -> bool:
    """Whether each node has told two things, which give rates."""
    return bool(history.nodes) and all(len(node.updates) > 1 for node in history.nodes)


def inspect(agents: Sequence[Found]) -> Inspection:
    """Why the job of these agents makes no progress."""
    looks = look_everywhere(agents)
    workers = [worker for node in looks.second.nodes for worker in node.workers]
    return Inspection(
        explanation_of(looks.first, looks.second),
        {worker.rank: current_site(worker) for worker in workers},
    )


class Inspections:
    """When to inspect a job: while it makes no progress; more and more rarely if it computes.

    Attributes:
        latest: the latest one; None: it makes progress.
    """

    def __init__(self) -> None:
        self.latest: Inspection | None = None
        self._at, self._interval_s = 0.0, _EXPLAIN_S

    def is_due(self, view: JobView, now: float) -> bool:
        """Whether to begin one now; the next is then due later."""
        if not view.is_stalled:
            self.latest, self._interval_s, self._at = None, _EXPLAIN_S, 0.0
        elif now >= self._at:
            self._at = now + self._interval_s
            return True
        return False

    def add(self, inspection: Inspection) -> None:
        """Take a result."""
        self.latest = inspection
        if inspection.explanation.kind is Verdict.NO_HANG:
            self._interval_s = min(2 * self._interval_s, _MOST_EXPLAIN_S)


def view_of_ended(job: EndedJob) -> JobView:
    """What is to be seen of a job that has ended."""
    ranks = tuple(
        RankView(
            rank=each.rank,
            node_rank=job.node_rank,
            host=job.host,
            pid=each.pid,
            state=RankState.ENDED,
            end=each.end,
        )
        for each in job.ranks
    )
    here = tuple(each.rank for each in job.ranks)
    view = JobView(
        round=job.round,
        phase="done",
        world_size=job.world_size,
        node_count=job.nodes,
        uptime_s=job.uptime_s,
        headline=_post_mortem(job),
        is_undecided=False,
        is_stalled=False,
        ranks=ranks,
        nodes=(NodeView(node_rank=job.node_rank, host=job.host, ranks=here, silent_s=None),),
        age_s=0.0,
        values={},
        step=job.step,
        total=job.total,
        status=job.status,
        ended_s=max(0.0, time.time() - job.ended),
    )
    return view.with_past(job.so_far)


def _post_mortem(job: EndedJob) -> str:
    """As `explain` says, if it knows the job."""
    said = job.text.partition("\n")[0]
    if job.status == 0:
        return said or "the job succeeded"
    saved = next(
        (each for each in kept_jobs() if (each.pid, each.ended) == (job.pid, job.ended)), None
    )
    if saved is not None and (why := saved.explained()).kind is not Verdict.NO_HANG:
        return why.sentence
    return said or f"the launcher ended with exit status {job.status}"


def view_json(
    job: RunningJob | EndedJob, view: JobView, *, with_defaults: bool
) -> dict[str, object]:
    """A view for `json.dumps`: times and shares to what is known of them, states as users read
    them.
    """
    told = _shown(to_json(view, with_defaults=with_defaults))
    assert isinstance(told, dict)
    return {"run_id": job.run_id, "name": job.name, **told}


def _shown(told: object) -> object:
    if isinstance(told, dict):
        return {name: _shown(each) for name, each in told.items()}
    if isinstance(told, list):
        return [_shown(each) for each in told]
    if isinstance(told, str) and told in RankState.__members__:
        return RankState[told].value
    return round(told, 6) if isinstance(told, float) else told
