"""Reads a node's workers once a second, for its agent (following.py), in a process of its own.

What it reads costs little, and disturbs nobody: the counters and the current call in the flight
records, and two files of /proc for each worker. It ends with its agent, or when the agent does not
want it any more.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from rallypoint.base.flight_record import read_counts, read_steps, watch_closely
from rallypoint.base.job_so_far import JobSoFar
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup, current_groups
from rallypoint.base.recorded_steps import RecordedSteps, steps_of_job
from rallypoint.base.trained_time import TrainedTime
from rallypoint.base.wording import how_ended
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES
from rallypoint.diagnosis.node_update import (
    GroupNames,
    GroupUpdate,
    NodeUpdate,
    RankUpdate,
    StepsUpdate,
    to_line,
)
from rallypoint.launch.inspection.agent_client import AgentConnection, NoAnswerError, read_status
from rallypoint.launch.inspection.following import LEASE_S
from rallypoint.launch.inspection.processes import read_task
from rallypoint.launch.inspection.requests import AgentStatus, RankStatus

_EVERY_S = 1.0
_MOST_GROUPS = 16  # of a rank: those in which it has waited for longest
_MOST_SITE = 60  # characters; the file's name and line are at the end


def read_each_second(agent: AgentConnection) -> None:
    """Read the node of the agent at the other end, until that is gone."""
    next_at = time.monotonic()
    least_s = 0.0  # of trained time, which must not fall when steps are dropped from their log
    while True:
        signal.alarm(int(LEASE_S))  # if the agent does not answer, or reading does not end
        try:
            update = read_agents_node(agent, least_s, closely=True)
            if update.so_far is not None and update.so_far.trained is not None:
                least_s = update.so_far.trained.trained_s
            agent.send_line(to_line(update))
        except NoAnswerError:
            return
        # Not at the same moment as the readers of all other nodes.
        next_at = max(next_at + _EVERY_S, time.monotonic())
        time.sleep(next_at - time.monotonic())


def read_agents_node(
    agent: AgentConnection, least_s: float = 0.0, *, closely: bool = False
) -> NodeUpdate:
    """The state of that agent's node now; errors are those of `AgentConnection`.

    Args:
        least_s: how long its job has trained at least.
        closely: it is read again within seconds, and somebody wants to see who waits.
    """
    answer, descriptors = agent.ask({"ask": "look"})
    try:
        status = read_status(answer)
        for worker in status.workers if closely and descriptors else ():
            watch_closely(descriptors[0], _offset(worker))
        return read_node(status, descriptors, least_s)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def read_node(status: AgentStatus, descriptors: Sequence[int], least_s: float = 0.0) -> NodeUpdate:
    """The state of a node now.

    Args:
        status: its agent's answer; the descriptors of its workers' records came with it.
        least_s: how long the job has trained at least.
    """
    now_ns = time.monotonic_ns()
    places: dict[GroupNames, int] = {}
    steps = [
        read_steps(descriptors[0], _offset(each), with_log=False) if descriptors else None
        for each in status.workers
    ]
    best = steps_of_job(steps)
    if best is not None:
        worker = status.workers[steps.index(best)]
        best = read_steps(descriptors[0], _offset(worker))
    ranks = [
        _read_rank(worker, descriptors, each, now_ns, places)
        for worker, each in zip(status.workers, steps, strict=True)
    ]
    return NodeUpdate(
        node_rank=status.node_rank,
        host=status.host,
        now_ms=now_ns // 1_000_000,
        uptime_ms=int(status.uptime_s * 1000),
        phase=status.phase,
        news=status.news,
        round=status.round,
        nodes=status.nodes,
        world_size=status.world_size,
        steps=_steps(best),
        groups=tuple(places),
        ranks=tuple(ranks),
        so_far=_with_trained(status.so_far, best, least_s),
    )


def _with_trained(
    so_far: JobSoFar | None, steps: RecordedSteps | None, least_s: float
) -> JobSoFar | None:
    """With the steps of this round."""
    if so_far is None or steps is None:
        return so_far
    trained = (so_far.trained or TrainedTime()).after(steps)
    least_s = max(least_s, trained.trained_s)
    return so_far.__replace__(trained=trained.__replace__(trained_s=least_s))


def _offset(worker: RankStatus) -> int:
    """Where its flight record begins."""
    return worker.record_slot * FLIGHT_RECORD_BYTES


def _steps(steps: RecordedSteps | None) -> StepsUpdate | None:
    if steps is None:
        return None
    return StepsUpdate(
        step=steps.step,
        total=steps.total,
        left_s=None if steps.remaining_s is None else round(steps.remaining_s),
        source=steps.source,
        values={name: f"{value:.6g}" for name, value in steps.values.items()},
    )


def _read_rank(
    worker: RankStatus,
    descriptors: Sequence[int],
    steps: RecordedSteps | None,
    now_ns: int,
    places: dict[GroupNames, int],
) -> RankUpdate:
    """A worker's state.

    Args:
        places: the node's groups so far, with their places.
    """
    task = None
    if worker.pid and not worker.has_ended:
        task = read_task(f"/proc/{worker.pid}", with_times=True)
    groups: list[RecordedGroup] = []
    if descriptors:
        groups = current_groups(read_counts(descriptors[0], _offset(worker)))
    of_call, call = _call(groups)
    counted = sorted((each for each in groups if not each.has_left), key=_weight, reverse=True)

    def place(group: RecordedGroup) -> int:
        names = GroupNames(
            name=group.name, key=group.key, members=group.members, backend=group.backend
        )
        return places.setdefault(names, len(places))

    return RankUpdate(
        rank=worker.rank,
        pid=worker.pid,
        state=task.state if task else "",
        end=how_ended(worker.code, worker.signal) if worker.has_ended else "",
        cpu_ms=round(task.cpu_s * 1000) if task else 0,
        starved_ms=task.waited_ns // 1_000_000 if task else -1,
        rss_kb=task.rss_bytes >> 10 if task else 0,
        group=-1 if of_call is None else place(of_call),
        operation="" if call is None else call.operation,
        number=-1 if call is None else call.number,
        is_running=call is not None and call.state == "running",
        for_ms=0 if call is None else max(0, now_ns - _moved_ns(call)) // 1_000_000,
        site="" if call is None else call.site[-_MOST_SITE:],
        counts=tuple(
            GroupUpdate.of(place(each), each.counts, now_ns) for each in counted[:_MOST_GROUPS]
        ),
        step=steps.step if steps else None,
        step_ms_ago=max(0, now_ns - steps.at_ns) // 1_000_000 if steps else 0,
    )


def _weight(group: RecordedGroup) -> int:
    return group.counts.waited_ns if group.counts else 0


def _moved_ns(call: RecordedCall) -> int:
    """When it began or, if it is over, ended."""
    return call.since_ns if call.state == "running" else max(call.since_ns, call.ended_ns)


def _call(groups: Sequence[RecordedGroup]) -> tuple[RecordedGroup | None, RecordedCall | None]:
    """The call that has lasted longest, or else the last one, and its group."""
    calls = [(group, call) for group in groups for call in (*group.calls[-1:], *group.transfers)]
    running = [each for each in calls if each[1].state == "running"]
    if running:
        return min(running, key=lambda each: each[1].since_ns)
    return max(calls, key=lambda each: _moved_ns(each[1]), default=(None, None))
