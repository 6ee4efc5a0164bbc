"""How a node looks for the reason why it does not find the others, and when it wakes up again."""

from __future__ import annotations

import time
from math import inf

import pytest
from tests.system.everyday import wait_until

from rallypoint.launch.rounds.linked import _run_in_thread
from rallypoint.launch.rounds.static_rounds import StaticGuest


def test_it_wakes_up_while_the_first_look_for_the_cause_outlasts_the_last_one() -> None:
    guest = StaticGuest.__new__(StaticGuest)
    guest._ask_at, guest._examine_at, guest._start_findings = time.monotonic(), inf, []
    wakes_at = guest.wake_at
    assert wakes_at is not None
    assert time.monotonic() < wakes_at < time.monotonic() + 1.0


def test_an_examination_that_fails_finds_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """As on a machine that has no threads left; waiting for its result would have no end."""

    def fails(*_: object, **__: object) -> str:
        raise RuntimeError("can't start new thread")

    findings: list[str] = []
    _run_in_thread(fails, findings)
    wait_until(lambda: findings == [""])
    assert capfd.readouterr().err == ""
