"""The problems of a job: everything that ranks wait for and that will not happen by itself.

False alarms are the worst errors. So something that may still happen counts only if ranks have
waited for it for a long time, longer than is usual in that group, and nothing in the job moved
between the two looks. Dead, stopped and deadlocked ranks count at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rallypoint.diagnosis import leads
from rallypoint.diagnosis.activity import Doing, is_users, main_stack
from rallypoint.diagnosis.causes import Obstacle, explain
from rallypoint.diagnosis.explanation import Cause, Strength
from rallypoint.diagnosis.graph import Needs, Node, ReducedGraph, waiters_of, waiting_for
from rallypoint.diagnosis.history import is_usual
from rallypoint.diagnosis.leads import Lead, lead_of, lead_of_flow
from rallypoint.diagnosis.sight import Condition, Rank, Sight
from rallypoint.diagnosis.waits import Wait

LONG_S = 1.5  # shorter waits show nothing
_FORMING_S = 5.0  # a process may take this long to join
_ALL_FORMING_S = 60.0
_NOTHING_MOVES_S = 10.0  # for a call that all are in
_IDLE = 0.05  # of a core
_FINAL = (
    *(Condition.KILLED, Condition.ENDED, Condition.RAISED),
    *(Condition.STOPPED, Condition.TRACED),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """One problem.

    Attributes:
        ranks: the ranks that it is about.
        waits: those of the ranks that wait for it directly.
        waiters: all ranks that wait for it, directly or indirectly.
        told: those of the waiters that the lead names.
    """

    cause: Cause
    ranks: tuple[int, ...]
    lead: Lead
    waits: tuple[Wait, ...]
    waiters: tuple[int, ...]
    told: tuple[int, ...] = ()
    strength: Strength = Strength.TOLD
    is_echo: bool = False
    when_ns: int = 0

    @property
    def order(self) -> tuple[int, int, int, int, tuple[int, ...]]:
        """The sort key: what is reported first."""
        return self.is_echo, self.cause.order, -len(self.waiters), self.when_ns, self.ranks


@dataclass(frozen=True, slots=True)
class _Situation:
    """What the findings are derived from; by_target: for each node, who waits for it directly."""

    sight: Sight
    waits: Sequence[Wait]
    needs: Needs
    reduction: ReducedGraph
    waiters: Mapping[Node, set[Node]]
    by_target: Mapping[Node, list[Wait]]

    def waiters_for(self, *nodes: Node) -> tuple[int, ...]:
        """The ranks that wait for one of these, directly or indirectly."""
        return _ranks(waiting_for(self.waiters, nodes))

    def roots(self, kind: str) -> list[Node]:
        """The roots that are not ranks."""
        return [node for node in self.reduction.roots if _is(node, kind)]


def find(
    sight: Sight, waits: Sequence[Wait], needs: Needs, reduction: ReducedGraph
) -> list[HangFinding]:
    """All findings, in order."""
    by_target: dict[Node, list[Wait]] = {}
    for wait in waits:
        for target in dict.fromkeys(target for clause in wait.clauses for target in clause):
            by_target.setdefault(target, []).append(wait)
    now = _Situation(sight, waits, needs, reduction, waiters_of(needs), by_target)
    found = [*_of_ranks(now), *_of_mismatches(now), *_of_flows(now), *_of_knots(now)]
    return sorted(found or _of_nothing(now), key=lambda each: each.order)


def _is(node: Node, kind: str) -> bool:
    return isinstance(node, tuple) and node[0] == kind


def _of_ranks(now: _Situation) -> list[HangFinding]:
    folded: dict[object, HangFinding] = {}
    for rank in now.sight:
        direct = now.by_target[rank.rank] if rank.rank in now.reduction.roots else []
        if not _counts(rank, direct, now.sight):
            continue
        why = explain(rank)
        lead = lead_of(rank, why, direct)
        came = next(filter(None, (leads.came_instead(now.sight, wait) for wait in direct)), "")
        if came:
            lead = replace(lead, text=f"{came}; {lead.text}", key=came)
        alike = folded.get((why.cause, lead.key))
        new = HangFinding(
            cause=why.cause,
            ranks=(rank.rank,),
            lead=lead,
            waits=tuple(direct),
            waiters=now.waiters_for(rank.rank),
            strength=_strength(why, direct),
            is_echo=rank.condition is Condition.ENDED and bool(_waits_of(now.waits, rank.rank)),
            when_ns=rank.end.ended_ns if rank.end else 0,
        )
        folded[why.cause, lead.key] = _joined(alike, new) if alike else new
    return list(folded.values())


def _joined(one: HangFinding, other: HangFinding) -> HangFinding:
    ranks = (*one.ranks, *other.ranks)
    return replace(
        one,
        ranks=ranks,
        waits=tuple(dict.fromkeys((*one.waits, *other.waits))),
        waiters=tuple(sorted({*one.waiters, *other.waiters} - set(ranks))),
        is_echo=one.is_echo and other.is_echo,
    )


def _strength(why: Obstacle, direct: Sequence[Wait]) -> Strength:
    if why.strength is not Strength.TOLD:
        return why.strength
    if direct and all(wait.strength is Strength.INFERRED for wait in direct):
        return Strength.INFERRED
    return Strength.TOLD


def _counts(rank: Rank, direct: Sequence[Wait], sight: Sight) -> bool:
    """Whether this rank is a reason to report a hang."""
    if rank.condition is Condition.ENDED and not (rank.end and rank.end.code):
        # At its end, the ranks of a job leave one after the other.
        if any(wait.call and wait.call.state == "failed" for wait in direct):
            return True
        return max((wait.for_s or 0.0 for wait in direct), default=0.0) >= LONG_S
    if rank.condition in _FINAL:
        return True
    if rank.condition is Condition.SILENT:
        return not sight.moved and bool(direct or not sight.knows_calls)
    if rank.condition is Condition.NOT_SEEN and not direct:
        return False
    return bool(direct) and not sight.moved and _is_long(rank, direct)


def _is_long(rank: Rank, direct: Sequence[Wait]) -> bool:
    """Whether it has been waited for so long that it should be reported."""
    longest = max(direct, key=lambda wait: wait.for_s or 0.0)
    process = rank.worker.process if rank.worker else None
    if longest.for_s is None:  # only stacks show the wait
        if process is None:
            return True
        if longest.strength is Strength.TOLD:  # in init_process_group
            return process.age_s >= _FORMING_S
        return process.cpu < _IDLE and rank.lingers
    if longest.for_s < LONG_S:
        return False
    return longest.group is None or not is_usual(longest.group, longest.for_s)


def _of_mismatches(now: _Situation) -> list[HangFinding]:
    found = []
    for node in now.roots("mismatch"):
        assert isinstance(node, tuple)
        direct = now.by_target[node]
        if max(wait.for_s or 0.0 for wait in direct) < LONG_S:
            continue
        lead, ranks, strength = leads.mismatch(now.sight, direct[0], int(node[2]))
        waiters = tuple(rank for rank in now.waiters_for(node) if rank not in ranks)
        found.append(
            HangFinding(
                cause=Cause.MISMATCH,
                ranks=ranks,
                lead=lead,
                waits=(),
                waiters=waiters,
                told=tuple(wait.rank for wait in direct),
                strength=strength,
            )
        )
    return found


def _of_flows(now: _Situation) -> list[HangFinding]:
    if now.sight.moved:
        return []
    return [
        HangFinding(
            cause=Cause.NETWORK,
            ranks=(),
            lead=lead_of_flow(now.sight, node[1], now.by_target[node]),
            waits=tuple(now.by_target[node]),
            waiters=now.waiters_for(node),
        )
        for node in now.roots("host")
        if isinstance(node, tuple)
    ]


def _of_knots(now: _Situation) -> list[HangFinding]:
    circle = leads.circle(now.waits, now.needs, now.reduction.stuck)
    if not circle:
        return []
    inferred = any(wait.strength is not Strength.TOLD for wait in circle)
    if min(wait.for_s if wait.for_s is not None else LONG_S for wait in circle) < LONG_S:
        return []
    sight = now.sight
    if any(_works_beside(sight.ranks[wait.rank]) for wait in circle):
        return []
    if sight.moved and (inferred or any(sight.ranks[wait.rank].moved for wait in circle)):
        return []
    ranks = tuple(wait.rank for wait in circle)
    return [
        HangFinding(
            cause=Cause.DEADLOCK,
            ranks=ranks,
            lead=leads.lead(sight, circle, probably=inferred),
            waits=(),
            waiters=now.waiters_for(*ranks),
            strength=Strength.INFERRED if inferred else Strength.TOLD,
        )
    ]


def _works_beside(rank: Rank) -> bool:
    """Whether it runs another Python thread, which may call what is waited for."""
    worker = rank.worker
    if worker is None or worker.process is None:
        return False
    runs = any(each.cpu >= 0.5 for each in worker.process.threads if each.id != rank.pid)
    main = main_stack(worker.stacks)
    return runs and any(
        frame for each in worker.stacks if each != main for frame in each.frames if is_users(frame)
    )


def _of_nothing(now: _Situation) -> list[HangFinding]:
    """The findings if all are in one call, or all form their group, and nothing happens."""
    idle = all(
        rank.worker is None or rank.worker.process is None or rank.worker.process.cpu < _IDLE
        for rank in now.sight
    )
    if now.sight.moved or not idle:
        return []
    forming = [rank for rank in now.sight if _forms_long(rank)]
    if forming and len(forming) == len(now.sight.ranks):
        text = (
            f"{{who}} {forming[0].activity}: cannot tell for what, because all are in it, and "
            "what their store holds is not known"
        )
        return [_unexplained(text, [rank.rank for rank in forming], [])]
    within = [
        wait for wait in now.waits if not wait.clauses and (wait.for_s or 0) >= _NOTHING_MOVES_S
    ]
    if not within or len({wait.words for wait in within}) > 1:
        return []
    text = (
        f"{{who}} all entered {within[0].words}, and nothing moves in it: cannot tell why, "
        "because nothing is known of what is between them"
    )
    return [_unexplained(text, [wait.rank for wait in within], within)]


def _forms_long(rank: Rank) -> bool:
    process = rank.worker.process if rank.worker else None
    if process is None or process.age_s < _ALL_FORMING_S:
        return False
    return rank.activity.doing is Doing.INIT


def _unexplained(text: str, ranks: Iterable[int], waits: Iterable[Wait]) -> HangFinding:
    return HangFinding(
        cause=Cause.TRANSPORT,
        ranks=tuple(ranks),
        lead=Lead.of(text),
        waits=tuple(waits),
        waiters=(),
        strength=Strength.UNKNOWN,
    )


def _waits_of(waits: Iterable[Wait], rank: int) -> list[Wait]:
    return [wait for wait in waits if wait.rank == rank]


def _ranks(nodes: Iterable[Node]) -> tuple[int, ...]:
    return tuple(sorted(node for node in nodes if isinstance(node, int)))
