"""What an everyday system test may not do is found in its source, and in its module's functions."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.conftest import SOON_S
from tests.system import everyday
from tests.system.everyday import faults, wait_until


def _polls() -> None:
    for _ in range(3):
        time.sleep(0.1)


def sleeps_in_a_helper() -> None:
    _polls()


def waits_briefly(process: subprocess.Popen[str]) -> None:
    process.wait(5)


def has_a_short_timeout() -> None:
    subprocess.run(["true"], timeout=10, check=True)


def has_a_bound_for_soon() -> None:
    began = time.monotonic()
    assert time.monotonic() - began < SOON_S


def bounds_a_duration() -> None:
    began = time.monotonic()
    assert time.monotonic() - began < 2


def bounds_what_was_measured(took_s: float) -> None:
    assert 1 <= took_s <= 5


def compares_the_whole(launch: Any) -> None:
    assert launch.err == ""


def is_fit(process: subprocess.Popen[str], launch: Any, took_s: float) -> None:
    process.wait(100)
    wait_until(lambda: "ready" in launch.err)
    assert launch.err.count("ready") == 1
    assert took_s > 1
    assert len(launch.err) < 50
    subprocess.run(["sleep", "0"], timeout=60, check=True)


@pytest.mark.parametrize(
    ("test", "fault"),
    [
        (sleeps_in_a_helper, "_polls, line 18: it sleeps"),
        (waits_briefly, "it waits for less than 60 s"),
        (has_a_short_timeout, "timeout is less than 60 s"),
        (has_a_bound_for_soon, "it has a bound of SOON_S"),
        (bounds_a_duration, "something may take less than 60 s"),
        (bounds_what_was_measured, "something may take less than 60 s"),
        (compares_the_whole, "it compares the whole output"),
    ],
)
def test_each_fault_is_found(test: Callable[..., None], fault: str) -> None:
    (found,) = faults(test)
    assert fault in found


def test_what_is_fit_passes() -> None:
    assert faults(is_fit) == []
    assert faults(compares_the_whole, writer="the launcher") == []


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--rdzv-backend c10d x.py", f"--rdzv-conf {everyday.PATIENT} --rdzv-backend c10d x.py"),
        ("--rdzv-backend static x.py", "--rdzv-backend static x.py"),
        ("--standalone x.py", "--standalone x.py"),
        ("--rdzv-conf is_host=1", f"--rdzv-conf is_host=1,{everyday.PATIENT}"),
        *[(f"--rdzv-conf keep_alive_interval={a},keep_alive_max_attempt=10", None) for a in (3, 5)],
    ],
)
def test_leases_are_long(monkeypatch: pytest.MonkeyPatch, words: str, given: str | None) -> None:
    assert everyday.patient(words.split()) == words.split()  # in other tests
    monkeypatch.setattr(everyday, "is_on", True)
    assert everyday.patient(words.split()) == (given or words).split()


def test_a_short_lease_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everyday, "is_on", True)
    for conf in ("keep_alive_interval=1,keep_alive_max_attempt=5", "keep_alive_interval=5"):
        with pytest.raises(AssertionError, match="a lease of"):
            everyday.patient(["--rdzv-conf", conf])
