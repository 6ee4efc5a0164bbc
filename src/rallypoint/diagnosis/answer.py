"""Why is a job stuck, slow or dead? Two samples of it go in, an answer comes out.

    facts --job_state.py--> ranks --waits.py--> waits --graph.py--> roots, cycles
          --findings.py, causes.py--> what is wrong --answer_text.py--> explanation

Causes are given only for roots, never for ranks that wait (docs/decisions/080-explain.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.diagnosis import answer_text
from rallypoint.diagnosis.activity import ActivityKind, activity
from rallypoint.diagnosis.answer_text import evidence, for_longest
from rallypoint.diagnosis.explanation import Cause, Edge, Explanation, Root, Strength, Verdict
from rallypoint.diagnosis.facts import Facts
from rallypoint.diagnosis.findings import find
from rallypoint.diagnosis.job_state import Condition, JobState, Rank, job_state
from rallypoint.diagnosis.phrases import does, listed, numbered, seconds, some_ranks
from rallypoint.diagnosis.stragglers import (
    Lateness,
    begun,
    is_open,
    lateness,
    readings,
    slow_ranks,
)
from rallypoint.diagnosis.waits import Wait, find_waits

_MOST_ACTIVITIES = 2
_MOST_SLOW = 2
_STARVED = 0.3


def explanation_of(*samples: Facts) -> Explanation:
    """The answer.

    Args:
        samples: taken about half a second apart, the earliest first. Two are enough; further ones
            show more of what is slow. The same one twice if there was only one sample, or the job
            is over: then only times show what lasts.
    """
    job = job_state(samples[0], samples[-1])
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
        is_early = samples[-1].round < 0
        reason = "its first round has not begun" if is_early else "no data of the job was kept"
        return _unknown(reason)
    silent = [rank.node for rank in job if rank.node and rank.condition is Condition.SILENT]
    if silent and not job.moved:
        return _unknown(f"node {silent[0].node_rank} ({silent[0].host}) has not answered")
    if unclear := _unclear(job):
        return Explanation(
            kind=Verdict.UNEXPLAINED, sentence=answer_text.cut(unclear), evidence=lines
        )
    return Explanation(
        kind=Verdict.NO_HANG,
        sentence=answer_text.joined(_no_hang(job, waits, samples)),
        evidence=lines,
        edges=_edges(waits),
        slow=tuple(slow_in(samples)),
    )


def _is_opaque(rank: Rank) -> bool:
    """Whether it is alive, and nothing but its process is known."""
    worker = rank.worker
    if worker is None or worker.end is not None or rank.condition is not Condition.RUNS:
        return False
    return not worker.groups and not worker.stacks


def _forms_group(rank: Rank) -> bool:
    is_alive = rank.condition is Condition.RUNS and rank.process is not None and rank.end is None
    return is_alive and rank.activity.kind is ActivityKind.INIT


def _unclear(job: JobState) -> str:
    """Why it is not known whether the job hangs; empty: it is known."""
    if all(_is_opaque(rank) for rank in job):
        return (
            "cannot determine whether the job hangs, because its workers report neither their calls"
            " nor their lines: rallypoint is not installed for them, or they are not Python"
            " programs (or were started with python -S)"
        )
    if len(job.ranks) == 1 or job.moved or not all(map(_forms_group, job)):
        return ""
    # It gets no root, so that nothing acts on it: the start of a healthy job looks the same.
    names = " or ".join(sorted({rank.activity.waits_in for rank in job}))
    sites = listed(sorted({rank.activity.site for rank in job}), _MOST_ACTIVITIES)
    return (
        f"all ranks are in {names} at {sites}: cannot determine whether they will meet; they do not"
        " if their backends or world sizes differ"
    )


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


def _no_hang(job: JobState, waits: Sequence[Wait], samples: Sequence[Facts]) -> list[str]:
    """``no hang: slow rank 2: ...``, ``all ranks left all_reduce #9001 200 ms ago``."""
    if all(rank.condition is Condition.ENDED for rank in job):
        return ["no hang: all ranks have ended (code 0)"]
    slow = [_slow_text(each, job, samples) for each in slow_in(samples)[:_MOST_SLOW]]
    state = _last_call(job, _largest(job))
    waiting = _waiting(waits, job)
    parts = [*slow, state, waiting]
    if waiting.startswith("no rank"):
        parts = [*slow, state] if state and slow else [*parts, *_doing(job)]
    first, *rest = filter(None, parts)
    return [f"no hang: {first}", *rest]


def slow_in(samples: Sequence[Facts]) -> list[Lateness]:
    """The ranks that keep the others waiting, the worst first; over the whole job if the time
    between the samples is too short to tell.
    """
    first, last = samples[0], samples[-1]
    if first.round != last.round or first is last:
        return []
    late = lateness(readings(first), readings(last))
    slow = slow_ranks(late)
    if slow or (late and not is_open(late)):
        return slow
    return slow_ranks(lateness(begun(last), readings(last)))


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
        return "no rank waits for another"
    ranks = sorted({wait.rank for wait in waiting})
    targets = {target for wait in waiting for clause in wait.clauses for target in clause}
    others = sorted(each for each in targets if isinstance(each, int) and each not in ranks)
    for_s = for_longest(waiting)
    verb = does("has waited" if for_s else "waits", len(ranks))
    whom = f" for {some_ranks(others)}" if others else ""
    what = f", which {job.ranks[others[0]].activity}" if len(others) == 1 else ""
    return f"{some_ranks(ranks)} {verb}{for_s} in {waiting[0].words}{whom}{what}"


def _slow_text(late: Lateness, job: JobState, samples: Sequence[Facts]) -> str:
    """``slow rank 2: others wait for it 45 ms of each 82 ms step; it is in ...``."""
    if late.step_s is not None:
        when = f"{seconds(late.late_s_per_step)} of each {seconds(late.step_s)} step"
    else:
        when = f"{late.share * 100:.0f} % of the time"
    text = f"slow rank {late.rank}: others wait for it {when}"
    starved = job.ranks[late.rank].starved
    if starved >= _STARVED:
        return f"{text}; it gets no core for {starved * 100:.0f} % of the time"
    own, others = Counter[str](), Counter[str]()
    for worker in (each for sample in samples for node in sample.nodes for each in node.workers):
        does_it = activity(worker)
        if does_it.site and not does_it.kind.communicates:
            (own if worker.rank == late.rank else others)[str(does_it)] += 1
    if not own:
        return text
    # Where the others are as often is not what makes it late.
    does_most = max(own, key=lambda each: own[each] - others[each] / max(1, len(job.ranks) - 1))
    return f"{text}; it {does_most} in {own[does_most]} of {len(samples)} samples"


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
