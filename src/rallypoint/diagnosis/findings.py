"""The problems of a job: everything that ranks wait for and that will not happen by itself.

False alarms are the worst errors. So an event that may still happen counts only if ranks have
waited for it longer than is usual in that group. Also, nothing in the job may have moved between
the two samples. Dead, stopped and deadlocked ranks count at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rallypoint.base.recorded_call import RecordedGroup
from rallypoint.diagnosis.activity import ActivityKind, is_users, main_stack
from rallypoint.diagnosis.answer_text import (
    HangFinding,
    Headline,
    deadlock_headline,
    flow_headline,
    mismatch_headline,
    rank_headline,
    shortest_cycle,
    unexpected_message,
    unnumbered_headline,
)
from rallypoint.diagnosis.causes import Obstacle, explain
from rallypoint.diagnosis.explanation import Cause, Strength
from rallypoint.diagnosis.graph import Needs, Node, ReducedGraph, reduce_graph, waiting_for
from rallypoint.diagnosis.job_state import Condition, JobState, Rank
from rallypoint.diagnosis.waits import Wait, needs_of

LONG_S = 1.5  # shorter waits show nothing
_FORMING_S = 5.0  # a process may take this long to join
_ALL_FORMING_S = 60.0
_NOTHING_MOVES_S = 10.0  # for a call that all are in
_IDLE = 0.05  # of a core
_USUAL_TIMES = 3


@dataclass(frozen=True, slots=True)
class _Situation:
    """What the findings are derived from; by_target: for each node, the direct waits for it."""

    job: JobState
    waits: Sequence[Wait]
    needs: Needs
    reduction: ReducedGraph
    waiters: Mapping[Node, set[Node]]
    by_target: Mapping[Node, list[Wait]]

    def waiters_for(self, *nodes: Node) -> tuple[int, ...]:
        """The ranks that wait for one of these, directly or indirectly."""
        found = waiting_for(self.waiters, nodes)
        return tuple(sorted(node for node in found if isinstance(node, int)))

    def roots(self, kind: str) -> list[tuple[tuple[str, ...], list[Wait]]]:
        """The roots of a kind other than ranks, each with the direct waits for it."""
        return [
            (node, self.by_target[node])
            for node in self.reduction.roots
            if not isinstance(node, int) and node[0] == kind
        ]


def find(job: JobState, waits: Sequence[Wait]) -> list[HangFinding]:
    """All findings, in order."""
    by_target: dict[Node, list[Wait]] = {}
    for wait in waits:
        for target in dict.fromkeys(target for clause in wait.clauses for target in clause):
            by_target.setdefault(target, []).append(wait)
    waiters: dict[Node, set[Node]] = {
        target: {wait.rank for wait in direct} for target, direct in by_target.items()
    }
    needs = needs_of(waits)
    now = _Situation(job, waits, needs, reduce_graph(needs), waiters, by_target)
    found = [*_of_ranks(now), *_of_mismatches(now), *_of_flows(now), *_of_deadlock(now)]
    return sorted(found or _of_nothing(now), key=lambda each: each.order)


def _of_ranks(now: _Situation) -> list[HangFinding]:
    folded: dict[object, HangFinding] = {}
    for rank in now.job:
        direct = now.by_target[rank.rank] if rank.rank in now.reduction.roots else []
        if not _counts(rank, direct, now.job):
            continue
        why = explain(rank)
        what = rank_headline(rank, why, direct)
        came = [text for wait in direct if (text := unexpected_message(now.job, wait))]
        if came:
            what = replace(what, text=f"{came[0]}; {what.text}")
        has_ended = rank.condition is Condition.ENDED
        new = HangFinding(
            cause=why.cause,
            ranks=(rank.rank,),
            headline=what,
            waits=tuple(direct),
            waiters=now.waiters_for(rank.rank),
            strength=_strength(why, direct),
            is_secondary=has_ended and any(wait.rank == rank.rank for wait in now.waits),
            when_ns=rank.end.ended_ns if rank.end else 0,
        )
        alike = folded.get((why.cause, what.key))
        folded[why.cause, what.key] = _joined(alike, new) if alike else new
    return list(folded.values())


def _joined(one: HangFinding, other: HangFinding) -> HangFinding:
    ranks = (*one.ranks, *other.ranks)
    return replace(
        one,
        ranks=ranks,
        waits=tuple(dict.fromkeys((*one.waits, *other.waits))),
        waiters=tuple(sorted({*one.waiters, *other.waiters} - set(ranks))),
        is_secondary=one.is_secondary and other.is_secondary,
    )


def _strength(why: Obstacle, direct: Sequence[Wait]) -> Strength:
    if why.strength is not Strength.CERTAIN:
        return why.strength
    if direct and all(wait.strength is Strength.INFERRED for wait in direct):
        return Strength.INFERRED
    return Strength.CERTAIN


def _counts(rank: Rank, direct: Sequence[Wait], job: JobState) -> bool:
    """Whether this rank is a reason to report a hang."""
    if rank.condition is Condition.ENDED and not (rank.end and rank.end.failed):
        # At its end, the ranks of a job leave one after the other.
        has_failed = any(wait.call and wait.call.state == "failed" for wait in direct)
        return has_failed or _longest_s(direct) >= LONG_S
    if rank.condition.is_final:
        return True
    if rank.condition is Condition.SILENT:
        return not job.moved and bool(direct or not job.knows_calls)
    return bool(direct) and not job.moved and _is_long(rank, direct)


def _longest_s(waits: Iterable[Wait]) -> float:
    return max((wait.for_s or 0.0 for wait in waits), default=0.0)


def _is_long(rank: Rank, direct: Sequence[Wait]) -> bool:
    """Whether it has been waited for so long that it should be reported."""
    longest = max(direct, key=lambda wait: wait.for_s or 0.0)
    if longest.for_s is None:  # only stacks show the wait
        if rank.process is None:
            return True
        if longest.strength is Strength.CERTAIN:  # in init_process_group
            return rank.process.age_s >= _FORMING_S
        return rank.process.cpu < _IDLE and rank.stays
    if longest.for_s < LONG_S:
        return False
    return longest.group is None or not is_usual(longest.group, longest.for_s)


def is_usual(group: RecordedGroup, wait_s: float) -> bool:
    """Whether the calls before this one took about as long, more than once or twice.

    A job whose ranks wait for one of them in each step is slow; it does not hang.
    """
    long = [call for call in group.calls if call.took_s >= wait_s * 2 / 3]
    return len(long) >= _USUAL_TIMES


def _of_mismatches(now: _Situation) -> list[HangFinding]:
    found = []
    for node, direct in now.roots("mismatch"):
        if _longest_s(direct) < LONG_S:
            continue
        what, ranks, strength = mismatch_headline(now.job, direct[0], int(node[2]))
        found.append(
            HangFinding(
                cause=Cause.MISMATCH,
                ranks=ranks,
                headline=what,
                waiters=tuple(rank for rank in now.waiters_for(node) if rank not in ranks),
                named=tuple(wait.rank for wait in direct),
                strength=strength,
            )
        )
    return found


def _of_flows(now: _Situation) -> list[HangFinding]:
    if now.job.moved:
        return []
    return [
        HangFinding(
            cause=Cause.NETWORK,
            ranks=(),
            headline=flow_headline(now.job, node[1], direct),
            waits=tuple(direct),
            waiters=now.waiters_for(node),
        )
        for node, direct in now.roots("host")
    ]


def _of_deadlock(now: _Situation) -> list[HangFinding]:
    cycle = shortest_cycle(now.waits, now.needs, now.reduction.stuck)
    if not cycle or any(wait.for_s is not None and wait.for_s < LONG_S for wait in cycle):
        return []
    strength = Strength.CERTAIN
    if any(wait.strength is not Strength.CERTAIN for wait in cycle):
        strength = Strength.INFERRED
    members = [now.job.ranks[wait.rank] for wait in cycle]
    if any(map(_works_beside, members)) or any(rank.moved for rank in members):
        return []
    if now.job.moved and strength is Strength.INFERRED:
        return []
    ranks = tuple(wait.rank for wait in cycle)
    return [
        HangFinding(
            cause=Cause.DEADLOCK,
            ranks=ranks,
            headline=deadlock_headline(now.job, cycle, strength),
            waiters=now.waiters_for(*ranks),
            strength=strength,
        )
    ]


def _works_beside(rank: Rank) -> bool:
    """Whether it runs another Python thread, which may call what is waited for."""
    threads = rank.process.threads if rank.process else ()
    main = main_stack(rank.stacks)
    return any(each.cpu >= 0.5 for each in threads if each.id != rank.pid) and any(
        is_users(frame) for each in rank.stacks if each != main for frame in each.frames
    )


def _of_nothing(now: _Situation) -> list[HangFinding]:
    """The findings if all are in one call, or all form their group, and nothing happens."""
    is_idle = all(rank.process is None or rank.process.cpu < _IDLE for rank in now.job)
    if now.job.moved or not is_idle:
        return []
    forming = [rank for rank in now.job if _forms_long(rank)]
    if forming and len(forming) == len(now.job.ranks):
        text = (
            f"{{who}} {forming[0].activity}: cannot determine for what, because all are in it, and"
            " the contents of their store are unknown"
        )
        return [_unexplained(text, [rank.rank for rank in forming], [])]
    if differ := _of_unnumbered(now.job):
        return [differ]
    within = [
        wait for wait in now.waits if not wait.clauses and (wait.for_s or 0) >= _NOTHING_MOVES_S
    ]
    if not within or len({wait.words for wait in within}) > 1:
        return []
    text = (
        f"{{who}} all entered {within[0].words}, and it makes no progress: cannot determine why,"
        " because nothing is known of the network between them"
    )
    return [_unexplained(text, [wait.rank for wait in within], within)]


def _of_unnumbered(job: JobState) -> HangFinding | None:
    """The finding if only stacks show the calls, and not all ranks are in the same."""
    by_operation: dict[str, list[Rank]] = {}
    for rank in job:
        is_known = rank.activity.kind is ActivityKind.COLLECTIVE and rank.process is not None
        if not is_known or not rank.stays or rank.condition is not Condition.RUNS:
            return None
        by_operation.setdefault(rank.activity.waits_in, []).append(rank)
    if job.knows_calls or len(by_operation) < 2:
        return None
    sides = sorted(by_operation.values(), key=len)
    odd = tuple(rank.rank for side in sides[:-1] for rank in side)
    return HangFinding(
        cause=Cause.MISMATCH,
        ranks=odd,
        headline=unnumbered_headline(sides),
        waiters=tuple(rank.rank for rank in sides[-1]),
        named=tuple(job.ranks),
        strength=Strength.INFERRED,
    )


def _forms_long(rank: Rank) -> bool:
    age_s = rank.process.age_s if rank.process else 0.0
    return age_s >= _ALL_FORMING_S and rank.activity.kind is ActivityKind.INIT


def _unexplained(text: str, ranks: Iterable[int], waits: Iterable[Wait]) -> HangFinding:
    return HangFinding(
        cause=Cause.TRANSPORT,
        ranks=tuple(ranks),
        headline=Headline.of(text),
        waits=tuple(waits),
        strength=Strength.UNKNOWN,
    )
