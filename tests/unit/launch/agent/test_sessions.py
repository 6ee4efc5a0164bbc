"""Shares of the processor: nice values by the kernel's own table, and who gets a session."""

from __future__ import annotations

import os

import pytest

from rallypoint.launch.agent.guardian import choose_sessions, nice_of

# sched_prio_to_weight of kernel/sched/core.c, for nice 0 to -20.
WEIGHTS = [1024, 1277, 1586, 1991, 2501, 3121, 3906, 4904, 6100, 7620, 9548, 11916, 14949, 18705]
WEIGHTS += [23254, 29154, 36291, 46273, 56483, 71755, 88761]


@pytest.mark.parametrize("sessions", range(1, 81))
def test_a_nice_value_weighs_as_much_as_the_sessions(sessions: int) -> None:
    weight = WEIGHTS[-nice_of(sessions)]
    assert weight / WEIGHTS[0] == pytest.approx(sessions, rel=0.13)


def test_there_is_a_lowest_nice_value() -> None:
    assert nice_of(4096) == -20


def test_who_gets_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert choose_sessions(1, {}) == "each"
    assert choose_sessions(4, {}) == "-6:each"
    assert choose_sessions(8, {}) == "-9:one"
    assert choose_sessions(8, {"RALLYPOINT_SESSIONS": "each"}) == "each"
    assert choose_sessions(4, {"RALLYPOINT_SESSIONS": "one"}) == "-6:one"
