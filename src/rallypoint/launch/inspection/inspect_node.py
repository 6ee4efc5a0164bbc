"""Inspects a node of a job, in a program on it that asks the node's agent.

    agent: which workers run or ended -+
    flight records: the calls ---------+--> facts, twice, half a second apart
    the kernel: processes, network ----+
    stacks: where in the program ------+

It takes at most one second, whatever state the workers are in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rallypoint.base.flight_record import read_groups, read_steps, watch_closely
from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.base.recorded_steps import RecordedSteps
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES
from rallypoint.diagnosis.facts import Node, Process, WorkerEnd, WorkerFacts
from rallypoint.launch.inspection.agent_client import AgentConnection, read_status
from rallypoint.launch.inspection.processes import ProcessSample, waiting_flows
from rallypoint.launch.inspection.python_stacks import Answer, ask_for_stacks
from rallypoint.launch.inspection.requests import AgentStatus, RankStatus

BETWEEN_S = 0.5
_BRIEFLY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSamples:
    """Two samples of one node."""

    status: AgentStatus
    first: Node
    second: Node


class ProcessSnapshot(NamedTuple):
    """What the kernel reports of a process, and its stacks."""

    process: Process | None
    answer: Answer


def inspect_briefly(pids: Iterable[int]) -> dict[int, ProcessSnapshot]:
    """Inspect some processes in a tenth of a second, when there is no time for more."""
    pids = tuple(pids)
    before = ProcessSample(pids)
    answers = ask_for_stacks(pids, running=before.running())
    time.sleep(max(0.0, before.at + _BRIEFLY_S - time.monotonic()))
    processes = ProcessSample(pids).processes(before)
    return {pid: ProcessSnapshot(processes.get(pid), answers[pid]) for pid in pids}


def sample_twice(agent: AgentConnection, between_s: float = BETWEEN_S) -> NodeSamples:
    """The state of an agent's node now, and `between_s` later."""
    answer, descriptors = agent.ask({"ask": "look"})
    try:
        status = read_status(answer)
        pids = [each.pid for each in status.running]
        before = ProcessSample(pids)
        stacks = ask_for_stacks(pids, running=before.running())
        first = _node(status, descriptors, before.processes(before), stacks)
        time.sleep(max(0.0, before.at + between_s - time.monotonic()))
        stacks = ask_for_stacks(pids, running=before.running())
        second = _node(status, descriptors, ProcessSample(pids).processes(before), stacks)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return NodeSamples(status=status, first=first, second=second)


def _node(
    status: AgentStatus,
    descriptors: Sequence[int],
    processes: Mapping[int, Process],
    answers: Mapping[int, Answer],
) -> Node:
    now_ns = time.monotonic_ns()
    not_asked = Answer((), "it was not asked")
    return Node(
        node_rank=status.node_rank,
        host=status.host,
        now_ns=now_ns,
        ranks=tuple(each.rank for each in status.workers),
        workers=tuple(
            _worker(
                each,
                descriptors,
                ProcessSnapshot(processes.get(each.pid), answers.get(each.pid, not_asked)),
                now_ns,
            )
            for each in status.workers
        ),
        oom_kills=status.oom_kills,
        is_paused=status.is_paused,
        loopback_trouble=status.loopback_trouble,
        flows=waiting_flows({each.pid: each.rank for each in status.running}),
    )


def _worker(
    rank: RankStatus, descriptors: Sequence[int], seen: ProcessSnapshot, now_ns: int
) -> WorkerFacts:
    groups: tuple[RecordedGroup, ...] = ()
    steps: RecordedSteps | None = None
    if descriptors:
        offset = rank.record_slot * FLIGHT_RECORD_BYTES
        groups = read_groups(descriptors[0], offset)
        watch_closely(descriptors[0], offset)
        steps = read_steps(descriptors[0], offset)
    ago_s = max(0.0, time.time() - rank.ended_at)
    end = WorkerEnd(
        code=rank.code,
        signal=rank.signal,
        by_launcher=rank.by_launcher,
        error=rank.error,
        ended_ns=now_ns - int(ago_s * 1e9),
    )
    if rank.has_ended:
        return worker_facts(rank.rank, rank.local_rank, groups, seen, end=end)
    facts = worker_facts(rank.rank, rank.local_rank, groups, seen)
    if steps is not None:
        steps = steps.__replace__(values={}, log=())
    raised_ns = end.ended_ns if rank.error else 0
    return replace(facts, error=rank.error, raised_ns=raised_ns, steps=steps)


def worker_facts(
    rank: int,
    local_rank: int,
    groups: tuple[RecordedGroup, ...],
    seen: ProcessSnapshot,
    end: WorkerEnd | None = None,
) -> WorkerFacts:
    """What was found of a worker."""
    return WorkerFacts(
        rank=rank,
        local_rank=local_rank,
        process=seen.process,
        end=end,
        groups=groups,
        has_record=bool(groups),
        stacks=seen.answer.stacks,
        no_stacks_because=seen.answer.because,
        library=seen.answer.library,
        gil=seen.answer.gil,
    )
