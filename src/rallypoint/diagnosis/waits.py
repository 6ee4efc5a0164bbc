"""Which ranks wait, in which call, and for which ranks: the edges of the graph.

A call is a set of clauses (graph.py): a collective needs each member that it takes data from, a
receive its sender, a receive from any rank one of the others, a send its receiver. A member in the
same call is not waited for, unless it cannot move at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.activity import Activity, Doing, of_thread, short_site
from rallypoint.diagnosis.attendance import Attendances, members_in
from rallypoint.diagnosis.explanation import Strength
from rallypoint.diagnosis.facts import Flow
from rallypoint.diagnosis.graph import Clause
from rallypoint.diagnosis.phrases import numbered
from rallypoint.diagnosis.sight import Condition, Rank, Sight

_STALLED_S = 2.0  # for a connection with data in flight
_MAY_WAIT = (Doing.UNKNOWN, Doing.C_CODE, Doing.GPU, Doing.CALLS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wait:
    """A rank that waits in a call.

    Attributes:
        call: None if only its name is known, from a stack; then `group` may be None, too.
        for_s: how long; None if unknown.
        within: what made the call, if not a line of the user's: ``"backward"``.
    """

    rank: int
    group: RecordedGroup | None
    call: RecordedCall | None
    operation: str
    clauses: tuple[Clause, ...]
    site: str
    for_s: float | None
    strength: Strength = Strength.TOLD
    within: str = ""

    @property
    def words(self) -> str:
        """``all_reduce #17``, ``recv, tag 7``, ``init_process_group``."""
        return numbered(self.call) if self.call else self.operation


def find_waits(sight: Sight) -> list[Wait]:
    """All waits, including calls in which nothing is missing, which have no clauses."""
    attendances = Attendances(sight)
    return [wait for rank in sight for wait in _waits_of(rank, sight, attendances)]


def blocks(rank: Rank) -> list[tuple[RecordedGroup, RecordedCall]]:
    """The calls that a rank's program waits for, as far as known."""
    running = [
        (group, call)
        for group in rank.groups.values()
        for call in (*group.calls, *group.transfers)
        if _goes_on(rank, group, call)
    ]
    if failed := [(group, call) for group, call in running if call.state == "failed"]:
        return failed  # it ended for that; others may be done, and their backend has not said so
    doing = waiting_activity(rank).doing
    if doing is Doing.COLLECTIVE:
        running = [(group, call) for group, call in running if call.peer is None]
    elif doing is Doing.TRANSFER:
        running = [(group, call) for group, call in running if call.peer is not None]
    elif doing is Doing.RUNS:  # a thread that waits for a GPU may be using its core
        running = [(group, call) for group, call in running if "nccl" in group.backend]
    elif doing not in _MAY_WAIT:
        return []
    return [each for each in running if each[1].site] or _latest(running, doing)


def _latest(
    running: list[tuple[RecordedGroup, RecordedCall]], doing: Doing
) -> list[tuple[RecordedGroup, RecordedCall]]:
    """If the stack shows a call, that is the latest one; earlier ones continue in the background.

    This does not hold if some are queued: then the latest one has not begun.
    """
    if doing not in (Doing.COLLECTIVE, Doing.TRANSFER):
        return running
    if any(group.backend == "rallypoint" and group.queued for group, _ in running):
        return running
    last_ns = max((call.since_ns for _, call in running), default=0)
    return [each for each in running if each[1].since_ns == last_ns]


def waiting_activity(rank: Rank) -> Activity:
    """What its program does, or the thread for which it waits."""
    own = rank.activity
    if own.doing not in (Doing.LOCK, Doing.QUEUE) or rank.worker is None:
        return own
    for stack in rank.worker.stacks:
        other = of_thread(stack)
        if other.doing.communicates:
            return other
    if own.words.endswith("lock of its own process") and own.frame and not _in_python(rank):
        # A work's wait looks the same: a line of the user's program that sleeps in C code.
        has_calls = any(
            _goes_on(rank, group, call)
            for group in rank.groups.values()
            for call in (*group.calls, *group.transfers)
        )
        if has_calls:
            return Activity(doing=Doing.CALLS, words="waits for a call", frame=own.frame)
    return own


def _in_python(rank: Rank) -> bool:
    """Whether the main thread's innermost frame is one of Python's own."""
    assert rank.worker is not None
    main = next((each for each in rank.worker.stacks if each.is_main), rank.worker.stacks[-1])
    return bool(main.frames) and main.frames[0].file.endswith("threading.py")


def _goes_on(rank: Rank, group: RecordedGroup, call: RecordedCall) -> bool:
    if call.state == "running":
        return not group.has_left and not rank.condition.is_over
    is_last = call in (*group.calls[-1:], *group.transfers)
    lives = rank.end is None and rank.worker is not None and rank.worker.process is not None
    return call.state == "failed" and not lives and is_last


def _waits_of(rank: Rank, sight: Sight, attendances: Attendances) -> list[Wait]:
    if rank.condition not in (Condition.RUNS, Condition.ENDED):
        return []
    doing = waiting_activity(rank)
    found = [
        Wait(
            rank=rank.rank,
            group=group,
            call=call,
            operation=call.operation,
            clauses=_of_collective(rank, group, call, sight, attendances)
            if call.peer is None
            else _of_transfer(rank, group, call, sight),
            site=short_site(call.site) or doing.site,
            for_s=rank.since_s(call.since_ns),
            strength=_strength(rank, group, call),
            within="backward" if doing.waits_in == "backward" else "",
        )
        for group, call in blocks(rank)
    ]
    if found or rank.condition is not Condition.RUNS:
        return found
    clauses: tuple[Clause, ...] = ()
    if doing.doing is Doing.INIT:
        clauses = _of_forming(rank, sight)
    elif doing.doing is Doing.COLLECTIVE and not _knows_collectives(rank):
        clauses = _of_nameless(rank, sight)
    elif doing.doing is Doing.TRANSFER and not _knows_transfers(rank):
        others = frozenset(other.rank for other in sight if other.rank != rank.rank)
        clauses = (others,) if others else ()
    if not clauses:
        return []
    return [
        Wait(
            rank=rank.rank,
            group=None,
            call=None,
            operation=doing.waits_in,
            clauses=clauses,
            site=doing.site,
            for_s=None,
            strength=Strength.TOLD if doing.doing is Doing.INIT else Strength.INFERRED,
        )
    ]


def _strength(rank: Rank, group: RecordedGroup, call: RecordedCall) -> Strength:
    """The certainty of a wait; a rank that does something else may have begun the call in the
    background.
    """
    if call.state == "failed":
        return Strength.TOLD
    doing = waiting_activity(rank).doing
    if doing in (Doing.UNKNOWN, Doing.C_CODE, Doing.GPU, Doing.RUNS) and group.queued:
        return Strength.INFERRED
    return Strength.TOLD


def _knows_collectives(rank: Rank) -> bool:
    return any(group.calls for group in rank.groups.values())


def _knows_transfers(rank: Rank) -> bool:
    return bool(rank.groups) and all(group.is_complete for group in rank.groups.values())


def _of_collective(
    rank: Rank, group: RecordedGroup, call: RecordedCall, sight: Sight, attendances: Attendances
) -> tuple[Clause, ...]:
    needed = attendances.needed(rank.rank, group, call)
    if not needed:
        members = attendances.at(group, call.number).members
        needed = [("host", flow.peer) for flow in _stalled(sight, members)]
    return tuple(frozenset((target,)) for target in dict.fromkeys(needed))


def _of_transfer(
    rank: Rank, group: RecordedGroup, call: RecordedCall, sight: Sight
) -> tuple[Clause, ...]:
    assert call.peer is not None
    members = members_in(group, sight)
    own = members.index(rank.rank) if rank.rank in members else -1
    peers = [place for place in range(len(members)) if place != own]
    if call.peer >= 0:
        peers = [call.peer] if call.peer < len(members) else []
    others = {
        place: sight.ranks[members[place]] for place in peers if members[place] in sight.ranks
    }
    for other in others.values():
        theirs = other.groups.get(group.key)
        can_move = other.condition is Condition.RUNS
        if can_move and _matches(call, own, theirs):
            return _across(sight, rank, other)
    targets = frozenset(other.rank for other in others.values())
    return (targets,) if targets else ()


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


def _across(sight: Sight, rank: Rank, other: Rank) -> tuple[Clause, ...]:
    """The clauses if both ends are in the call: only the network between them can be the cause."""
    flows = _stalled(sight, (rank.rank,)) or _stalled(sight, (other.rank,))
    return (frozenset((("host", flows[0].peer),)),) if flows else ()


def _of_forming(rank: Rank, sight: Sight) -> tuple[Clause, ...]:
    """The ranks that have not joined; the members of further groups are unknown."""
    return tuple(
        frozenset((other.rank,))
        for other in sight
        if other.rank != rank.rank
        and waiting_activity(other).doing is not Doing.INIT
        and (not other.groups or bool(rank.groups))
    )


def _of_nameless(rank: Rank, sight: Sight) -> tuple[Clause, ...]:
    """The clauses for calls without numbers: every rank that is in none is waited for."""
    return tuple(
        frozenset((other.rank,))
        for other in sight
        if other.rank != rank.rank
        and (
            other.condition is not Condition.RUNS or not waiting_activity(other).doing.communicates
        )
    )


def _stalled(sight: Sight, ranks: Sequence[int]) -> list[Flow]:
    return [
        flow
        for rank in sight
        if rank.node is not None and rank.rank in ranks
        for flow in rank.node.flows
        if flow.rank == rank.rank
        and flow.stalled_s >= _STALLED_S
        and (flow.unacknowledged_bytes or flow.retransmits)
    ]
