"""Groups as a worker's record has them."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.base.recorded_call import RecordedGroup, current_groups


def group(**fields: Any) -> RecordedGroup:
    given = {"name": "g", "key": "k", "members": "", "has_left": False, "queued": 0}
    return RecordedGroup(**{**given, "calls": (), "transfers": (), **fields})


@pytest.mark.parametrize(
    ("members", "ranks"), [("", ()), ("3", (3,)), ("0-2,7", (0, 1, 2, 7)), ("5,1", (5, 1))]
)
def test_members(members: str, ranks: tuple[int, ...]) -> None:
    found = group(members=members)
    assert found.ranks == ranks
    assert [found.global_rank(rank) for rank in range(-1, len(ranks) + 1)] == [None, *ranks, None]


def test_groups_that_were_formed_anew() -> None:
    old, new = group(has_left=True), group(key="l")
    left = group(name="other", has_left=True)
    assert current_groups((old, new, left)) == [new, left]
