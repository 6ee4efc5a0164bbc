"""Whether ranks called different operations under one number, and which ranks differ."""

from __future__ import annotations

from collections.abc import Iterable

from rallypoint.base.collective import has_one_size, reduces
from rallypoint.base.recorded_call import RecordedCall, RecordedGroup
from rallypoint.diagnosis.phrases import knows_root, size
from rallypoint.diagnosis.sight import call_at

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
