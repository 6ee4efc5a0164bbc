"""What a process asks of its launcher when it has lost others."""

from __future__ import annotations

import pytest

from rallypoint.base.control_message import LostContact, Place
from rallypoint.base.errors import (
    CollectiveTimeoutError,
    HostError,
    PeerLostError,
    RallypointError,
    RevokedError,
    StoreConnectionError,
)
from rallypoint.process_group.formation import own_place


def unreachable(rank: int) -> HostError:
    error = HostError(f"cannot connect to rank {rank}")
    error.rank = rank
    return error


class Launcher:
    """One that says nothing of a loss until it is told, and then perhaps has a new round."""

    def __init__(self, *, helps: bool) -> None:
        self.told: list[object] = []
        self._helps = helps

    def wait(self, after: int, timeout_s: float) -> Place | None:
        return Place(after + 1, {}, is_urgent=True) if self.told and self._helps else None

    def send(self, message: object) -> None:
        self.told.append(message)

    def is_kept(self, after: int) -> bool:
        return False


@pytest.mark.parametrize(
    ("error", "culprit"),
    [
        (CollectiveTimeoutError("no connection to rank 2", rank=2), 2),
        (PeerLostError("rank 2 died", rank=2), -1),
        (RevokedError("rank 1 revoked the group", rank=1), -1),
        (StoreConnectionError("no store answered", endpoint="host1:5"), 0),
        (HostError("another token"), -1),
        (unreachable(2), 2),
        (CollectiveTimeoutError("not done within 3 s"), -1),
        (None, -1),
    ],
)
@pytest.mark.parametrize("had_formed", [False, True])
def test_a_launcher_that_has_no_news_is_told(
    monkeypatch: pytest.MonkeyPatch,
    error: RallypointError | None,
    culprit: int,
    had_formed: bool,
) -> None:
    launcher = Launcher(helps=True)
    monkeypatch.setattr(own_place, "control_link", lambda: launcher)
    found = own_place.next_place(3, error, had_formed=had_formed)
    assert found == Place(4, {}, is_urgent=True)
    assert launcher.told == [LostContact(3, culprit, had_formed)]


def test_it_may_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Launcher(helps=False)
    monkeypatch.setattr(own_place, "control_link", lambda: launcher)
    assert own_place.next_place(3, None) is None
    assert len(launcher.told) == 1


def test_who_is_kept_waits_as_long_as_its_launcher_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patient(Launcher):
        waits = 0

        def wait(self, after: int, timeout_s: float) -> Place | None:
            self.waits += 1
            return Place(after + 1, {}) if self.waits == 50 else None

        def is_kept(self, after: int) -> bool:
            return after == 3

    launcher = Patient(helps=False)
    monkeypatch.setattr(own_place, "control_link", lambda: launcher)
    assert own_place.next_place(3, None) == Place(4, {})
    assert launcher.told == []


def test_without_a_launcher_there_is_no_other_place() -> None:
    assert own_place.next_place(3, None) is None
