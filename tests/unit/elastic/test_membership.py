"""What a process makes of an error of its own calls."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

import rallypoint
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    NotInitializedError,
    PeerLostError,
    RallypointError,
)
from rallypoint.elastic.membership import Membership

LATE = CollectiveTimeoutError("all_reduce waited 3 s for rank 1", rank=1)


@pytest.mark.parametrize(
    ("error", "is_elastic", "outlives"),
    [
        (PeerLostError("rank 1 died", rank=1), False, True),
        (LATE, True, True),
        (LATE, False, False),  # it has no state yet
        (CollectiveTimeoutError("not done within 3 s"), True, False),  # nobody is named
    ],
)
def test_what_it_outlives(error: RallypointError, *, is_elastic: bool, outlives: bool) -> None:
    part = Membership()
    part._link = SimpleNamespace(is_elastic=is_elastic)  # type: ignore[assignment]
    assert part.outlives(error) is outlives


def test_a_group_of_pytorch_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.distributed", torch)
    text = "torch.distributed has a default group, but .* call rallypoint.init_process_group"
    with pytest.raises(NotInitializedError, match=text):
        Membership().begin()
    with pytest.raises(NotInitializedError, match=text):
        rallypoint.get_rank(None)


def test_without_a_launcher_a_timeout_is_an_error() -> None:
    assert not Membership().outlives(LATE)
