"""The state of each rank, from two samples of a job: is it alive, what does it do, has it moved?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from rallypoint.base.recorded_call import RecordedCall, RecordedGroup, current_groups
from rallypoint.diagnosis.activity import Activity, activity, main_stack
from rallypoint.diagnosis.facts import Facts, Node, Process, Stack, WorkerEnd, WorkerFacts

_HARDLY_RUNS = 0.05  # of a core
_ENDING_S = 1.5  # what an interpreter takes to end, when all is well
_INTERPRETER = re.compile(r"$|(lib)?python\d")  # or unknown


class Condition(Enum):
    """Whether a rank can move at all."""

    RUNS = "runs"
    KILLED = "killed"
    ENDED = "ended"
    RAISED = "raised"  # an exception ends it, and something keeps it from ending
    STOPPED = "stopped"
    TRACED = "traced"
    SILENT = "silent"
    IN_KERNEL = "in the kernel"
    HOLDS_GIL = "holds the GIL"
    NOT_SEEN = "not seen"

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self in (Condition.KILLED, Condition.ENDED)

    @property
    def is_final(self) -> bool:
        """Whether it has ended, or makes no progress until a user intervenes."""
        return self.is_over or self in (Condition.RAISED, Condition.STOPPED, Condition.TRACED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """What is known of one rank.

    Attributes:
        node: the node where it runs; None if unknown.
        worker: from the second sample; None if it was not seen.
        groups: its groups by key, without those that it left and formed anew.
        moved: whether it began or ended a call between the samples.
        stays: whether its main thread was at the same line in both.
    """

    rank: int
    node: Node | None
    worker: WorkerFacts | None
    condition: Condition
    activity: Activity
    groups: Mapping[str, RecordedGroup]
    moved: bool
    stays: bool

    @property
    def end(self) -> WorkerEnd | None:
        """How it ended."""
        return self.worker.end if self.worker else None

    @property
    def process(self) -> Process | None:
        """The kernel's facts about it."""
        return self.worker.process if self.worker else None

    @property
    def pid(self) -> int:
        """The process number; 0 if unknown."""
        return self.process.pid if self.process else 0

    @property
    def starved(self) -> float:
        """The share of the time in which it was ready but had no core, if it needs one."""
        if self.process is None or self.activity.kind.is_idle:
            return 0.0
        return self.process.starved

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """Its Python threads."""
        return self.worker.stacks if self.worker else ()

    @property
    def has_record(self) -> bool:
        """Whether its calls are known."""
        return self.worker is not None and self.worker.has_record

    def calls(self) -> Iterator[tuple[RecordedGroup, RecordedCall]]:
        """All calls in its record, each with its group."""
        for group in self.groups.values():
            for call in (*group.calls, *group.transfers):
                yield group, call

    def since_s(self, then_ns: int) -> float | None:
        """How long ago that time was."""
        if self.node is None or then_ns <= 0:
            return None
        return max(0.0, (self.node.now_ns - then_ns) / 1e9)


@dataclass(frozen=True, slots=True)
class JobState:
    """What is known of all ranks, by rank; the nodes are those of the second sample."""

    ranks: Mapping[int, Rank]
    nodes: tuple[Node, ...]

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.ranks.values())

    @property
    def moved(self) -> bool:
        """Whether any rank moved."""
        return any(rank.moved for rank in self)

    @property
    def knows_calls(self) -> bool:
        """Whether any rank's calls are known."""
        return any(any(rank.calls()) for rank in self)

    def members(self, group: RecordedGroup) -> tuple[int, ...]:
        """The members of a group, or those ranks that are known to be in it."""
        if group.ranks:
            return tuple(rank for rank in group.ranks if rank in self.ranks)
        return tuple(rank.rank for rank in self if group.key in rank.groups)


def job_state(first: Facts, second: Facts) -> JobState:
    """Combine two samples, which may be the same one."""
    earlier: dict[int, WorkerFacts] = {}
    if first.round == second.round:
        earlier = {worker.rank: worker for node in first.nodes for worker in node.workers}
    ranks = {rank: _rank(rank, None, None, None) for rank in range(second.world_size)}
    for node in second.nodes:
        workers = {worker.rank: worker for worker in node.workers}
        for rank in {*node.ranks, *workers}:
            ranks[rank] = _rank(rank, node, workers.get(rank), earlier.get(rank))
    named = _with_names([ranks[rank] for rank in sorted(ranks)])
    return JobState({rank.rank: rank for rank in named}, second.nodes)


def entered(group: RecordedGroup) -> int:
    """The highest number of a call that this worker has made or queued in a group; -1 if none."""
    last = group.calls[-1] if group.calls else None
    number = last.number if last else -1
    if group.backend != "rallypoint" or not group.queued:
        return number
    runs = last is not None and last.state == "running"
    return number + group.queued - (1 if runs else 0)


def call_at(group: RecordedGroup, number: int) -> RecordedCall | None:
    """The collective of that number, if the record still has it."""
    return next((call for call in group.calls if call.number == number), None)


def _rank(
    rank: int, node: Node | None, worker: WorkerFacts | None, before: WorkerFacts | None
) -> Rank:
    return Rank(
        rank=rank,
        node=node,
        worker=worker,
        condition=_condition(node, worker, before),
        activity=activity(worker or WorkerFacts(rank=rank, local_rank=0, process=None)),
        groups={group.key: group for group in current_groups(worker.groups if worker else ())},
        moved=worker is not None and before is not None and _calls(worker) != _calls(before),
        stays=worker is None or before is None or _frames(worker) == _frames(before),
    )


def _with_names(ranks: Sequence[Rank]) -> list[Rank]:
    """Ranks whose calls have the names that other members give to them.

    Another backend's counters tell that a call has begun before its name is known.
    """
    names: dict[tuple[str, int], set[str]] = {}
    for group in (group for rank in ranks for group in rank.groups.values()):
        for call in group.calls:
            names.setdefault((group.key, call.number), set()).add(call.operation)

    def named(group: RecordedGroup) -> RecordedGroup:
        if all(call.operation for call in group.calls):
            return group
        calls = []
        for call in group.calls:
            known = names[group.key, call.number] - {""}
            is_told = not call.operation and len(known) == 1
            calls.append(call.__replace__(operation=known.pop()) if is_told else call)
        return group.__replace__(calls=tuple(calls))

    return [
        replace(rank, groups={key: named(group) for key, group in rank.groups.items()})
        for rank in ranks
    ]


def _condition(
    node: Node | None, worker: WorkerFacts | None, before: WorkerFacts | None
) -> Condition:
    if node is not None and node.silent_s is not None:
        return Condition.SILENT
    if worker is None:
        return Condition.NOT_SEEN
    if worker.end is not None and not worker.end.by_launcher:
        is_killed = worker.end.signal and not worker.end.error  # or it had raised that before
        return Condition.KILLED if is_killed else Condition.ENDED
    if worker.process is None:
        # A worker that the launcher has ended was in the call that its record shows.
        is_known = worker.end or worker.groups or worker.stacks
        return Condition.RUNS if is_known else Condition.NOT_SEEN
    now_ns = node.now_ns if node is not None else 0
    if worker.error and now_ns - worker.raised_ns >= _ENDING_S * 1e9:
        return Condition.RAISED
    return _of_living(worker, worker.process, before)


def _of_living(worker: WorkerFacts, process: Process, before: WorkerFacts | None) -> Condition:
    """A live worker's condition: a debugger or a disk may stop it for moments, in one sample."""
    earlier = before.process if before else None
    if earlier is None or earlier.state == process.state:
        if process.state in _LASTING:
            return _LASTING[process.state]
        if process.state == "D" and process.cpu < _HARDLY_RUNS:
            return Condition.IN_KERNEL
    return Condition.HOLDS_GIL if _keeps_gil(worker, process, before) else Condition.RUNS


def _keeps_gil(worker: WorkerFacts, process: Process, before: WorkerFacts | None) -> bool:
    """Whether one thread held the GIL in both samples, and ran no Python code to release it."""
    if before is None or before.gil != worker.gil:
        return False
    now, then = (
        next((each for each in sample.stacks if each.thread == worker.gil), None)
        for sample in (worker, before)
    )
    if now is None or then is None or now.frames != then.frames:
        return False
    if all(thread.cpu < _HARDLY_RUNS for thread in process.threads):
        return True
    libraries = (before.library, worker.library)
    return now.is_main and not any(map(_INTERPRETER.match, libraries))


_LASTING = {"T": Condition.STOPPED, "t": Condition.TRACED, "Z": Condition.ENDED}


def _frames(worker: WorkerFacts) -> object:
    main = main_stack(worker.stacks)
    return main.frames if main else ()


def _calls(worker: WorkerFacts) -> object:
    """A value that changes when a worker begins or ends a call."""
    return {
        (
            group.key,
            group.has_left,
            group.queued,
            group.transfers_begun,
            tuple((call.number, call.state) for call in group.calls[-2:]),
            tuple((call.number, call.operation, call.peer, call.state) for call in group.transfers),
        )
        for group in worker.groups
    }
