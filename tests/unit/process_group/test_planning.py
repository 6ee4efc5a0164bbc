"""Which layout of ranks on hosts the programs may count on."""

from __future__ import annotations

from rallypoint.process_group.planning import ranks_per_host


def test_ranks_per_host() -> None:
    assert ranks_per_host([0, 0, 0]) == 0
    assert ranks_per_host([0, 0, 1, 1]) == 2
    assert ranks_per_host([0, 0, 1]) == 2
    assert ranks_per_host([0, 1, 1]) == 1
    assert ranks_per_host([0, 1, 0, 1]) == 1
    assert ranks_per_host([0, 1, 2]) == 1
