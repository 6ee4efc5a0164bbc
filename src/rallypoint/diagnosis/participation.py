"""Which ranks are in a collective and which are not, computed once for all that wait in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from rallypoint.base.collective import has_one_size, reduces
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.graph import Node
from rallypoint.diagnosis.job_state import Condition, JobState, Rank, call_at, entered
from rallypoint.diagnosis.phrases import knows_root

Sides = list[list[tuple[int, RecordedGroup, RecordedCall]]]


def sides(job: JobState, group: RecordedGroup, number: int) -> Sides:
    """A group's members by what they called, the smallest side first; members that have not called
    are left out.
    """
    found: Sides = []
    for rank in job.members(group):
        own = job.ranks[rank].groups.get(group.key)
        call = call_at(own, number) if own else None
        if own is None or call is None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Participation:
    """The participation of a group's members in one collective.

    Attributes:
        missing: members that have not called it; those about which nothing is known count as
            missing.
        held_up: members that have called it but cannot proceed: they are dead, stopped, or hold the
            GIL.
        behind: members that have queued it behind an earlier call.
        differs: whether they called operations that cannot belong together.
    """

    members: tuple[int, ...]
    missing: frozenset[int]
    held_up: frozenset[int]
    behind: tuple[int, ...]
    differs: bool


class Participations:
    """The participation in all collectives of a job."""

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
        others = [each for each in found.members if each != rank]
        cannot_serve = found.missing | found.held_up
        if root is not None and root in others and (root in cannot_serve or found.differs):
            others = [root]
        targets: list[Node] = [each for each in others if each in found.missing]
        if found.differs:
            targets.append(("mismatch", group.key, str(call.number)))
        targets += [each for each in others if each in found.held_up]
        for each in found.behind:
            if each in others:
                theirs = self.job.ranks[each].groups[group.key]
                earlier = self.needed(each, theirs, theirs.calls[-1])
                targets += [target for target in earlier if target != rank]
        return list(dict.fromkeys(targets))

    def _find(self, group: RecordedGroup, number: int) -> _Participation:
        members = self.job.members(group)
        here: list[tuple[Rank, RecordedGroup]] = []
        for member in members:
            rank = self.job.ranks[member]
            own = rank.groups.get(group.key)
            if own is not None and entered(own) >= number:
                here.append((rank, own))
        return _Participation(
            members=members,
            missing=frozenset(members) - {rank.rank for rank, _ in here},
            held_up=frozenset(rank.rank for rank, own in here if _is_held_up(rank, own, number)),
            behind=tuple(
                rank.rank
                for rank, own in here
                if not rank.condition.is_over and _has_queued(own, number)
            ),
            differs=len(sides(self.job, group, number)) > 1,
        )


def _is_held_up(rank: Rank, group: RecordedGroup, number: int) -> bool:
    if rank.condition is Condition.RUNS:
        return False
    call = call_at(group, number)
    return call is None or call.state == "running"


def _has_queued(group: RecordedGroup, number: int) -> bool:
    if group.backend != "rallypoint" or not group.queued or not group.calls:
        return False
    return group.calls[-1].state == "running" and group.calls[-1].number < number
