"""Which ranks are in a collective and which are not, computed once for all that wait in it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rallypoint.base.collective import has_one_size, reduces
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.graph import Node
from rallypoint.diagnosis.phrases import knows_root, size
from rallypoint.diagnosis.sight import Condition, Rank, Sight, call_at, entered, members_of

Sides = list[list[tuple[int, RecordedGroup, RecordedCall]]]


def differ(groups: Iterable[tuple[int, RecordedGroup | None]], number: int) -> bool:
    """Whether two members called operations that cannot belong together."""
    return len(sides(groups, number)) > 1


def sides(groups: Iterable[tuple[int, RecordedGroup | None]], number: int) -> Sides:
    """Ranks by what they called, the smallest side first; ranks that have not called are left
    out.
    """
    found: Sides = []
    for rank, group in groups:
        call = call_at(group, number) if group else None
        if group is None or call is None:
            continue
        for side in found:
            if _agree((side[0][1], side[0][2]), (group, call)):
                side.append((rank, group, call))
                break
        else:
            found.append([(rank, group, call)])
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
        pairs.append((size(a), size(b)))
    return all(x == y or not x or not y for x, y in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance:
    """The attendance of a group's members in one collective.

    Attributes:
        missing: members that have not called it; those about which nothing is known count as
            missing.
        held_up: members that have called it but cannot proceed: they are dead, stopped, or hold the
            GIL.
        behind: members that have queued it behind an earlier call.
        differs: whether they called different operations.
    """

    members: tuple[int, ...]
    missing: frozenset[int]
    held_up: frozenset[int]
    behind: tuple[int, ...]
    differs: bool


class Attendances:
    """The attendance in all collectives of a job."""

    def __init__(self, sight: Sight) -> None:
        self._sight = sight
        self._known: dict[tuple[str, int], Attendance] = {}

    def at(self, group: RecordedGroup, number: int) -> Attendance:
        """The attendance in this collective."""
        key = (group.key, number)
        if key not in self._known:
            self._known[key] = self._find(group, number)
        return self._known[key]

    def needed(self, rank: int, group: RecordedGroup, call: RecordedCall) -> list[Node]:
        """The ranks that a rank in this collective needs; all of them.

        Without its root, a collective that has one cannot proceed, even if all others come.
        """
        found = self.at(group, call.number)
        root = group.global_rank(call.root) if knows_root(call, group) else None
        others = [each for each in found.members if each != rank]
        if root in others and (root in found.missing | found.held_up or found.differs):
            assert root is not None
            others = [root]
        targets: list[Node] = [each for each in others if each in found.missing]
        if found.differs:
            targets.append(("mismatch", group.key, str(call.number)))
        targets += [each for each in others if each in found.held_up]
        for each in found.behind:
            if each in others:
                theirs = self._sight.ranks[each].groups[group.key]
                earlier = self.needed(each, theirs, theirs.calls[-1])
                targets += [target for target in earlier if target != rank]
        return list(dict.fromkeys(targets))

    def _find(self, group: RecordedGroup, number: int) -> Attendance:
        ranks = self._sight.ranks
        members = members_in(group, self._sight)
        theirs = {each: ranks[each].groups.get(group.key) for each in members}
        missing = frozenset(
            each for each, other in theirs.items() if other is None or entered(other) < number
        )
        here = [(each, other) for each, other in theirs.items() if other and each not in missing]
        return Attendance(
            members=members,
            missing=missing,
            held_up=frozenset(
                each for each, other in here if _is_held_up(ranks[each], other, number)
            ),
            behind=tuple(
                each
                for each, other in here
                if not ranks[each].condition.is_over and _has_queued(other, number)
            ),
            differs=differ(here, number),
        )


def members_in(group: RecordedGroup, sight: Sight) -> tuple[int, ...]:
    """The members of a group, or those ranks that are known to be in it."""
    known = members_of(group)
    if known:
        return tuple(rank for rank in known if rank in sight.ranks)
    return tuple(rank.rank for rank in sight if group.key in rank.groups)


def _is_held_up(rank: Rank, group: RecordedGroup, number: int) -> bool:
    if rank.condition is Condition.RUNS:
        return False
    call = call_at(group, number)
    return call is None or call.state == "running"


def _has_queued(group: RecordedGroup, number: int) -> bool:
    if group.backend != "rallypoint" or not group.queued or not group.calls:
        return False
    return group.calls[-1].state == "running" and group.calls[-1].number < number
