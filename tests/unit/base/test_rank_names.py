from __future__ import annotations

import pytest

from rallypoint.base.wording import name_ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2], "ranks 0-2"), ([0, 2, 3, 9], "ranks 0, 2-3, 9")],
)
def test_ranks_are_folded(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
