"""Which ranks wait, in which call, and for which ranks: the edges of the graph.

A call is a set of clauses (graph.py): a collective needs each member that it takes data from, a
receive its sender, a receive from any rank one of the others, a send its receiver. A member in the
same call is not waited for, unless it cannot move at all, or called it differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from rallypoint.base.collective import has_one_size, reduces
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.activity import (
    WAITS_FOR_LOCK,
    Activity,
    ActivityKind,
    main_stack,
    of_thread,
    short_site,
)
from rallypoint.diagnosis.explanation import Strength
from rallypoint.diagnosis.facts import StalledConnection
from rallypoint.diagnosis.graph import Clause, Node
from rallypoint.diagnosis.job_state import Condition, JobState, Rank, call_at, entered
from rallypoint.diagnosis.phrases import knows_root, numbered

_STALLED_S = 2.0  # for a connection with data in flight
_MAY_WAIT = (ActivityKind.UNKNOWN, ActivityKind.C_CODE, ActivityKind.GPU, ActivityKind.CALLS)

Calls = list[tuple[RecordedGroup, RecordedCall]]
Sides = list[list[tuple[int, RecordedGroup, RecordedCall]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wait:
    """A rank that waits in a call.

    Attributes:
        call: None if only its name is known, from a stack; then `group` is None, too.
        for_s: how long; None if unknown.
        within: what made the call, if not a line of the user's: ``"backward"``.
    """

    rank: int
    group: RecordedGroup | None = None
    call: RecordedCall | None = None
    operation: str
    clauses: tuple[Clause, ...]
    site: str
    for_s: float | None = None
    strength: Strength
    within: str = ""

    @property
    def words(self) -> str:
        """``all_reduce #17``, ``recv, tag 7``, ``init_process_group``."""
        return numbered(self.call) if self.call else self.operation

    @property
    def is_in_transfer(self) -> bool:
        """Whether it is in a send or receive of its record."""
        return self.call is not None and self.call.peer is not None

    @property
    def full_name(self) -> str:
        """``all_reduce #17 of default group``; without the group if that is unknown."""
        return f"{self.words} of {self.group.name}" if self.group else self.words

    @property
    def group_key(self) -> str:
        """Its group's key; empty if unknown."""
        return self.group.key if self.group else ""

    @property
    def key(self) -> tuple[str, str]:
        """Equal for waits in the same call."""
        return (self.group_key, self.words)


def find_waits(job: JobState) -> list[Wait]:
    """All waits, including calls in which nothing is missing, which have no clauses."""
    participations = _Participations(job)
    return [
        wait
        for rank in job
        if rank.condition in (Condition.RUNS, Condition.ENDED)
        for wait in _waits_of(rank, participations)
    ]


def needs_of(waits: Iterable[Wait]) -> dict[Node, tuple[Clause, ...]]:
    """The graph; a rank waits for all of its waits."""
    needs: dict[Node, tuple[Clause, ...]] = {}
    for wait in waits:
        if wait.clauses:
            needs[wait.rank] = (*needs.get(wait.rank, ()), *wait.clauses)
    return needs


def _waits_of(rank: Rank, participations: _Participations) -> list[Wait]:
    job = participations.job
    activity = _waiting_activity(rank)
    found = [
        Wait(
            rank=rank.rank,
            group=group,
            call=call,
            operation=call.operation,
            clauses=_of_collective(rank, group, call, participations)
            if call.peer is None
            else _of_transfer(rank, group, call, job),
            site=short_site(call.site) or activity.site,
            for_s=rank.since_s(call.since_ns),
            strength=_strength(activity.kind, group, call),
            within="backward" if activity.waits_in == "backward" else "",
        )
        for group, call in _blocking_calls(rank, activity.kind)
    ]
    if found or rank.condition is not Condition.RUNS:
        return found
    clauses = _of_stack(rank, activity.kind, job)
    if not clauses:
        return []
    return [
        Wait(
            rank=rank.rank,
            operation=activity.waits_in,
            clauses=clauses,
            site=activity.site,
            strength=Strength.CERTAIN if activity.kind is ActivityKind.INIT else Strength.INFERRED,
        )
    ]


def _blocking_calls(rank: Rank, kind: ActivityKind) -> Calls:
    """The calls that a rank's program waits for, as far as known."""
    running = [(group, call) for group, call in rank.calls() if _goes_on(rank, group, call)]
    if failed := [(group, call) for group, call in running if call.state == "failed"]:
        return failed  # it ended for that; others may be done, unreported by their backend
    if kind is ActivityKind.COLLECTIVE:
        running = [(group, call) for group, call in running if call.peer is None]
    elif kind is ActivityKind.TRANSFER:
        running = [(group, call) for group, call in running if call.peer is not None]
    elif kind is ActivityKind.RUNS:  # a thread that waits for a GPU may be using its core
        running = [(group, call) for group, call in running if "nccl" in group.backend]
    elif kind not in _MAY_WAIT:
        return []
    return [each for each in running if each[1].site] or _latest(running, kind)


def _latest(running: Calls, kind: ActivityKind) -> Calls:
    """If the stack shows a call, that is the latest one; earlier ones continue in the background.

    This does not hold if some are queued: then the latest one has not begun.
    """
    if kind not in (ActivityKind.COLLECTIVE, ActivityKind.TRANSFER):
        return running
    if any(group.backend == "rallypoint" and group.queued for group, _ in running):
        return running
    last_ns = max((call.since_ns for _, call in running), default=0)
    return [each for each in running if each[1].since_ns == last_ns]


def _waiting_activity(rank: Rank) -> Activity:
    """What its program does, or the thread for which it waits."""
    own = rank.activity
    if own.kind not in (ActivityKind.LOCK, ActivityKind.QUEUE):
        return own
    for stack in rank.stacks:
        other = of_thread(stack)
        if other.kind.communicates:
            return other
    main = main_stack(rank.stacks)
    is_in_python = main and main.frames and main.frames[0].file.endswith("threading.py")
    is_users_lock = own.words == WAITS_FOR_LOCK and own.frame and not is_in_python
    if is_users_lock and any(_goes_on(rank, group, call) for group, call in rank.calls()):
        # A work's wait looks the same: a line of the user's program that sleeps in C code.
        return Activity(ActivityKind.CALLS, "waits for a call", own.frame)
    return own


def _goes_on(rank: Rank, group: RecordedGroup, call: RecordedCall) -> bool:
    if call.state == "running":
        return not group.has_left and not rank.condition.is_over
    is_last = call in (*group.calls[-1:], *group.transfers)
    lives = rank.end is None and rank.process is not None
    return call.state == "failed" and not lives and is_last


def _strength(kind: ActivityKind, group: RecordedGroup, call: RecordedCall) -> Strength:
    """The certainty of a wait: a rank that does something else may call in the background."""
    is_inferred = call.state != "failed" and group.queued and not kind.communicates
    return Strength.INFERRED if is_inferred else Strength.CERTAIN


def _of_collective(
    rank: Rank, group: RecordedGroup, call: RecordedCall, participations: _Participations
) -> tuple[Clause, ...]:
    needed = participations.needed(rank.rank, group, call)
    if not needed:
        job = participations.job
        needed = [("host", flow.peer) for flow in _stalled(job, job.members(group))]
    return tuple(frozenset((target,)) for target in dict.fromkeys(needed))


@dataclass(slots=True, kw_only=True)
class _Participation:
    """Which of a group's members take part in one collective.

    Attributes:
        missing: members that have not called it; those about which nothing is known count as
            missing.
        held_up: members that have called it but cannot proceed: they are dead, stopped, or hold the
            GIL.
        behind: members that have queued it behind an earlier call.
        differs: whether they called operations that cannot belong together.
    """

    members: tuple[int, ...]
    differs: bool
    missing: list[int] = field(default_factory=list)
    held_up: list[int] = field(default_factory=list)
    behind: list[int] = field(default_factory=list)


class _Participations:
    """Who takes part in each collective of a job, found once for all that wait in it."""

    def __init__(self, job: JobState) -> None:
        self.job = job
        self._known: dict[tuple[str, int], _Participation] = {}

    def needed(self, rank: int, group: RecordedGroup, call: RecordedCall) -> list[Node]:
        """The ranks that a rank in this collective needs; all of them.

        Without its root, a collective that has one cannot proceed, even if all others come.
        """
        key = (group.key, call.number)
        if key not in self._known:
            self._known[key] = self._find(group, call.number)
        found = self._known[key]
        root = group.global_rank(call.root) if knows_root(call, group) else None
        others = {*found.members} - {rank}
        cannot_serve = (*found.missing, *found.held_up)
        if root is not None and root in others and (found.differs or root in cannot_serve):
            others = {root}
        targets: list[Node] = [each for each in found.missing if each in others]
        if found.differs:
            targets.append(("mismatch", group.key, str(call.number)))
        targets += [each for each in found.held_up if each in others]
        for each in found.behind:
            if each in others:
                theirs = self.job.ranks[each].groups[group.key]
                earlier = self.needed(each, theirs, theirs.calls[-1])
                targets += [target for target in earlier if target != rank]
        return list(dict.fromkeys(targets))

    def _find(self, group: RecordedGroup, number: int) -> _Participation:
        members = self.job.members(group)
        found = _Participation(members=members, differs=len(sides(self.job, group, number)) > 1)
        for member in members:
            rank = self.job.ranks[member]
            own = rank.groups.get(group.key)
            if own is None or entered(own) < number:
                found.missing.append(member)
                continue
            call = call_at(own, number)
            if rank.condition is not Condition.RUNS and (call is None or call.state == "running"):
                found.held_up.append(member)
            if not rank.condition.is_over and _has_queued(own, number):
                found.behind.append(member)
        return found


def _has_queued(group: RecordedGroup, number: int) -> bool:
    if group.backend != "rallypoint" or not group.queued or not group.calls:
        return False
    return group.calls[-1].state == "running" and group.calls[-1].number < number


def sides(job: JobState, group: RecordedGroup, number: int) -> Sides:
    """A group's members that have called, by what they called, the smallest side first.

    Without those whose call has no name yet: the counters of another backend know it first.
    """
    found: Sides = []
    for rank in job.members(group):
        own = job.ranks[rank].groups.get(group.key)
        call = call_at(own, number) if own else None
        if own is None or call is None or not call.operation:
            continue
        for side in found:
            if _agree(side[0][1:], (own, call)):
                side.append((rank, own, call))
                break
        else:
            found.append([(rank, own, call)])
    return sorted(found, key=len)


def _agree(
    one: tuple[RecordedGroup, RecordedCall], other: tuple[RecordedGroup, RecordedCall]
) -> bool:
    (group, a), (their_group, b) = one, other
    if a.operation != b.operation:
        return False
    if knows_root(a, group) and knows_root(b, their_group) and a.root != b.root:
        return False
    pairs: list[tuple[object, object]] = [(a.dtype, b.dtype)]
    if reduces(a.operation):
        pairs.append((a.operator, b.operator))
    # In other operations sizes may differ, or backends count differently.
    if has_one_size(a.operation):
        one_size, other_size = (prod(each.shape) if each.shape else each.count for each in (a, b))
        pairs.append((one_size, other_size))
    return all(x == y or not x or not y for x, y in pairs)


def _of_transfer(
    rank: Rank, group: RecordedGroup, call: RecordedCall, job: JobState
) -> tuple[Clause, ...]:
    assert call.peer is not None
    members = job.members(group)
    own = members.index(rank.rank) if rank.rank in members else -1
    peers = members[call.peer : call.peer + 1]
    if call.peer < 0:
        peers = tuple(each for each in members if each != rank.rank)
    for peer in peers:
        other = job.ranks[peer]
        theirs = other.groups.get(group.key)
        if other.condition is Condition.RUNS and _matches(call, own, theirs):
            # Both ends are in the call: only the network between them can be the cause.
            flows = _stalled(job, (rank.rank,)) or _stalled(job, (peer,))
            return (frozenset((("host", flows[0].peer),)),) if flows else ()
    return (frozenset(peers),) if peers else ()


def _matches(call: RecordedCall, own: int, theirs: RecordedGroup | None) -> bool:
    """Whether the peer is in the matching call."""
    wanted = "recv" if call.operation == "send" else "send"
    return any(
        other.operation == wanted
        and other.state == "running"
        and other.root == call.root
        and other.peer in (own, *([-1] if wanted == "recv" else []))
        for other in (theirs.transfers if theirs else ())
    )


def _of_stack(rank: Rank, kind: ActivityKind, job: JobState) -> tuple[Clause, ...]:
    """The clauses for a call that only the stack shows, without its number or peer."""
    others = [other for other in job if other.rank != rank.rank]
    if kind is ActivityKind.INIT:  # members of further groups are unknown
        needed = [
            other.rank
            for other in others
            if _waiting_activity(other).kind is not ActivityKind.INIT
            and (not other.groups or rank.groups)
        ]
    elif kind is ActivityKind.COLLECTIVE and not any(group.calls for group in rank.groups.values()):
        needed = [
            other.rank
            for other in others
            if other.condition is not Condition.RUNS
            or not _waiting_activity(other).kind.communicates
        ]
    elif kind is ActivityKind.TRANSFER and not (
        rank.groups and all(group.is_complete for group in rank.groups.values())
    ):
        return (frozenset(other.rank for other in others),) if others else ()
    else:
        return ()
    return tuple(frozenset((each,)) for each in needed)


def _stalled(job: JobState, ranks: Sequence[int]) -> list[StalledConnection]:
    return [
        flow
        for rank in job
        if rank.node is not None and rank.rank in ranks
        for flow in rank.node.flows
        if flow.rank == rank.rank
        and flow.stalled_s >= _STALLED_S
        and (flow.unacknowledged_bytes or flow.retransmits)
    ]
