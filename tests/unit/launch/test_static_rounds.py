"""When a node that has not found node 0 yet wakes up again."""

from __future__ import annotations

import time
from math import inf

from rallypoint.launch.rounds.static_rounds import StaticGuest


def test_it_wakes_up_while_the_first_look_for_the_cause_outlasts_the_last_one() -> None:
    guest = StaticGuest.__new__(StaticGuest)
    guest._ask_at, guest._examine_at, guest._start_findings = time.monotonic(), inf, []
    wakes_at = guest.wake_at
    assert wakes_at is not None
    assert time.monotonic() < wakes_at < time.monotonic() + 1.0
