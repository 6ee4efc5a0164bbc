"""Why is a job stuck, slow or dead? Two samples of it go in, an answer comes out.

    facts --job_state.py--> ranks --waits.py--> waits --graph.py--> roots, cycles
          --findings.py, causes.py--> what is wrong --answer_text.py--> explanation

Causes are given only for roots, never for ranks that wait (docs/decisions/080-explain.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rallypoint.base.collective import JOINT_OPERATIONS
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis import answer_text
from rallypoint.diagnosis.activity import ActivityKind
from rallypoint.diagnosis.answer_text import evidence, for_longest
from rallypoint.diagnosis.explanation import Cause, Edge, Explanation, Root, Strength, Verdict
from rallypoint.diagnosis.facts import Facts
from rallypoint.diagnosis.findings import find
from rallypoint.diagnosis.job_state import Condition, JobState, Rank, job_state
from rallypoint.diagnosis.phrases import does, numbered, seconds, some_ranks
from rallypoint.diagnosis.waits import Wait, find_waits

_MOST_ACTIVITIES = 2
_LEAST_S = 0.012  # three ticks of the coarse clock that is used for times
_LEAST_CALLS = 8
_OFTEN = 0.75  # 24 of 32
_OF_A_STEP = 0.1


def explanation_of(first: Facts, second: Facts) -> Explanation:
    """The answer.

    Args:
        first, second: taken about half a second apart. The same one twice if there was only one
            sample, or the job is over: then only times show what lasts.
    """
    job = job_state(first, second)
    waits = find_waits(job)
    findings = find(job, waits)
    lines = evidence(job, waits, findings)
    for node in (rank.node for rank in job if rank.activity.kind is ActivityKind.INIT):
        if node is not None and node.loopback_trouble:  # it cannot reach its neighbours
            where = f"on node {node.node_rank} ({node.host})"
            return Explanation(
                kind=Verdict.EXPLAINED,
                sentence=answer_text.cut(f"{where}, {node.loopback_trouble}"),
                evidence=lines,
            )
    if findings:
        main = findings[0]
        is_unknown = main.strength is Strength.UNKNOWN
        return Explanation(
            kind=Verdict.UNEXPLAINED if is_unknown else Verdict.EXPLAINED,
            sentence=answer_text.sentence(main),
            evidence=lines,
            roots=tuple(
                Root(
                    ranks=each.ranks,
                    cause=each.cause,
                    text=answer_text.main_clause(each),
                    strength=each.strength,
                    waited_for_by=each.waiters,
                    pids=tuple(pid for rank in each.ranks if (pid := job.ranks[rank].pid)),
                )
                for each in findings
            ),
            edges=_edges(waits),
            knot=next((each.ranks for each in findings if each.cause is Cause.DEADLOCK), ()),
        )
    if all(rank.condition is Condition.NOT_SEEN for rank in job):
        return _unknown("no data of the job was kept")
    silent = [rank.node for rank in job if rank.node and rank.condition is Condition.SILENT]
    if silent and not job.moved:
        return _unknown(f"node {silent[0].node_rank} ({silent[0].host}) has not answered")
    if all(_is_opaque(rank) for rank in job):
        return Explanation(
            kind=Verdict.UNEXPLAINED,
            sentence=(
                "cannot determine whether the job hangs, because its workers report neither their"
                " calls nor their lines: rallypoint is not installed for them, or they are not"
                " Python programs (or were started with python -S)."
            ),
            evidence=lines,
        )
    return Explanation(
        kind=Verdict.NO_HANG,
        sentence=answer_text.joined(_no_hang(job, waits)),
        evidence=lines,
        edges=_edges(waits),
    )


def _is_opaque(rank: Rank) -> bool:
    """Whether it is alive, and nothing but its process is known."""
    worker = rank.worker
    if worker is None or worker.end is not None or rank.condition is not Condition.RUNS:
        return False
    return not worker.groups and not worker.stacks


def _unknown(reason: str) -> Explanation:
    return Explanation(
        kind=Verdict.UNEXPLAINED,
        sentence=f"cannot determine why the job makes no progress, because {reason}.",
    )


def _edges(waits: Sequence[Wait]) -> tuple[Edge, ...]:
    """The edges; ranks that wait in the same way share one."""
    folded: dict[object, list[Wait]] = {}
    for wait in waits:
        folded.setdefault((wait.clauses, wait.key, wait.site), []).append(wait)
    return tuple(edge for alike in folded.values() for edge in _edges_of(alike))


def _edges_of(alike: Sequence[Wait]) -> list[Edge]:
    wait = alike[0]
    ranks = [
        sorted(target for target in clause if isinstance(target, int)) for clause in wait.clauses
    ]
    alone = tuple(sorted(each[0] for each in ranks if len(each) == 1))
    choices = [(tuple(each), True) for each in ranks if len(each) > 1]
    number = None
    if wait.call:
        number = wait.call.root if wait.is_in_transfer else wait.call.number
    return [
        Edge(
            ranks=tuple(each.rank for each in alike),
            waits_for=targets,
            any_of=any_of,
            group=wait.group.name if wait.group else "",
            operation=wait.operation,
            number=number,
            site=wait.site,
            for_s=max((each.for_s for each in alike if each.for_s is not None), default=None),
            strength=wait.strength,
        )
        for targets, any_of in [*([(alone, False)] if alone else []), *choices]
    ]


def _no_hang(job: JobState, waits: Sequence[Wait]) -> list[str]:
    """``no hang: all ranks left all_reduce #9001 200 ms ago``, ``the step takes 2.1 s ...``."""
    if all(rank.condition is Condition.ENDED for rank in job):
        return ["no hang: all ranks have ended (code 0)"]
    groups = _largest(job)
    found = pace(groups)
    slow = _pace_text(found, job) if found else ""
    state = _last_call(job, groups)
    waiting = _waiting(waits, job)
    parts = [state, waiting, slow]
    if waiting.startswith("no rank"):
        parts = [state, slow] if state and slow else [*parts, *_doing(job)]
    first, *rest = filter(None, parts)
    return [f"no hang: {first}", *rest]


def _last_call(job: JobState, groups: dict[int, RecordedGroup]) -> str:
    """Where all ranks are, if they are all past the same call."""
    last = {rank: group.calls[-1] for rank, group in groups.items() if group.calls}
    calls = list(last.values())
    is_same = len({call.number for call in calls}) == 1 and len(last) == len(groups)
    if not is_same or any(call.state != "done" for call in calls):
        return "calls continue" if job.moved else ""
    all_ranks = "all ranks" if len(groups) == len(job.ranks) else some_ranks(groups)
    ago = [job.ranks[rank].since_s(call.ended_ns) for rank, call in last.items()]
    known = [since_s for since_s in ago if since_s is not None]
    when = f" {seconds(min(known))} ago" if known else ""
    return f"{all_ranks} left {numbered(calls[0])}{when}"


def _doing(job: JobState) -> list[str]:
    """What the ranks do that wait for no other."""
    folded: dict[str, list[int]] = {}
    for rank in job:
        if rank.condition is Condition.RUNS and rank.activity.site:
            folded.setdefault(str(rank.activity), []).append(rank.rank)
    most = sorted(folded.items(), key=lambda each: -len(each[1]))[:_MOST_ACTIVITIES]
    return [f"{some_ranks(ranks)} {does(words, len(ranks))}" for words, ranks in most]


def _waiting(waits: Sequence[Wait], job: JobState) -> str:
    """Who waits for whom at present, which has not been long."""
    waiting = [wait for wait in waits if wait.clauses]
    if not waiting:
        if all(rank.activity.kind is ActivityKind.INIT for rank in job):
            return "all ranks are in init_process_group"
        return "no rank waits for another"
    ranks = sorted({wait.rank for wait in waiting})
    targets = {target for wait in waiting for clause in wait.clauses for target in clause}
    others = sorted(each for each in targets if isinstance(each, int) and each not in ranks)
    for_s = for_longest(waiting)
    verb = does("has waited" if for_s else "waits", len(ranks))
    whom = f" for {some_ranks(others)}" if others else ""
    what = f", which {job.ranks[others[0]].activity}" if len(others) == 1 else ""
    return f"{some_ranks(ranks)} {verb}{for_s} in {waiting[0].words}{whom}{what}"


def _pace_text(found: Pace, job: JobState) -> str:
    step = ""
    if found.step_s is not None:
        step = f"the step takes {seconds(found.step_s)} (median of {found.steps})"
    if found.last is None:
        return step if found.step_s and found.step_s >= 1.0 else ""
    rank = job.ranks[found.last]
    late = (
        f"rank {found.last} is slow: it comes last in {found.times} of {found.calls}, "
        f"{seconds(found.late_s)} after the others"
    )
    if rank.starved >= 0.3:
        late += f" (it gets no core for {rank.starved * 100:.0f} % of the time)"
    elif rank.activity.site and not rank.activity.kind.communicates:
        late += f" (it {rank.activity})"
    return f"{step}, {late}" if step else late


def _largest(job: JobState) -> dict[int, RecordedGroup]:
    """For each rank, the group with the most ranks; of equal ones, the one with the most calls."""
    by_key: dict[str, dict[int, RecordedGroup]] = {}
    for rank in job:
        for key, group in rank.groups.items():
            if not group.has_left and len(group.ranks) != 1:
                by_key.setdefault(key, {})[rank.rank] = group
    return max(
        by_key.values(),
        key=lambda groups: (len(groups), max(len(group.calls) for group in groups.values())),
        default={},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Statistics of a group's last collectives.

    Attributes:
        step_s: the time of a step; None if no period is visible.
        steps: the number of steps in that median.
        last: the rank that comes last in at least three of four collectives; None if there is none.
        times, calls: in how many collectives of how many.
        late_s: the median of its delay.
    """

    step_s: float | None = None
    steps: int = 0
    last: int | None = None
    times: int = 0
    calls: int = 0
    late_s: float = 0.0


def pace(groups: Mapping[int, RecordedGroup]) -> Pace | None:
    """What the members' records (by rank) show together; None if nothing.

    All leave a collective at nearly the same time, so the rank that was in it for the shortest time
    came last: no clocks are compared.
    """
    ended = {
        rank: {call.number: call for call in group.calls if call.state == "done" and call.ended_ns}
        for rank, group in groups.items()
    }
    if not ended or not all(ended.values()):
        return None
    step_s, steps, period = _step(list(next(iter(ended.values())).values()))
    best = Pace(step_s=step_s, steps=steps)
    together = [
        number
        for number in sorted(set.intersection(*map(set, ended.values())))
        if all(calls[number].operation in JOINT_OPERATIONS for calls in ended.values())
    ]
    for phase in range(period if len(groups) > 1 else 0):
        found = _late(ended, together[phase::period])
        if found and found.late_s > best.late_s and found.late_s >= _OF_A_STEP * (step_s or 0.0):
            best = replace(found, step_s=step_s, steps=steps)
    return best


def _late(ended: Mapping[int, Mapping[int, RecordedCall]], numbers: Sequence[int]) -> Pace | None:
    """Which rank comes last in these collectives; None if none does in most of them."""
    if len(numbers) < _LEAST_CALLS:
        return None
    lateness: dict[int, list[float]] = {}
    for number in numbers:
        took = {rank: calls[number].took_s for rank, calls in ended.items()}
        last = min(took, key=lambda rank: took[rank])
        late_s = median(each for rank, each in took.items() if rank != last) - took[last]
        if late_s >= _LEAST_S:
            lateness.setdefault(last, []).append(late_s)
    rank, late = max(lateness.items(), key=lambda each: len(each[1]), default=(0, []))
    if len(late) < _OFTEN * len(numbers):
        return None
    return Pace(last=rank, times=len(late), calls=len(numbers), late_s=median(late))


def _step(calls: Sequence[RecordedCall]) -> tuple[float | None, int, int]:
    """The time of a step, the number of steps in that median, and the number of calls in a step."""
    kinds = [(call.operation, call.dtype, call.count, call.shape) for call in calls]
    for period in range(1, len(calls) // 2 + 1):
        if all(kinds[i] == kinds[i - period] for i in range(period, len(kinds))):
            took = [
                (calls[i].ended_ns - calls[i - period].ended_ns) / 1e9
                for i in range(period, len(calls))
            ]
            return median(took), len(took), period
    return None, 0, 1
