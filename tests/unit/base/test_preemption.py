"""Signals that ask a process to end, and the time that it has left."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rallypoint.base import preemption as module
from rallypoint.base.errors import CallerError
from rallypoint.base.preemption import preempted, time_left
from rallypoint.base.worker_env import SHUTDOWN_TIMEOUT, SIGNALS


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[module._Watch]:
    """As if this process had not asked before; its handlers come back."""
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_END_TIME", SHUTDOWN_TIMEOUT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SIGNALS, "SIGUSR1,SIGINT")
    fresh = module._Watch()
    monkeypatch.setattr(module, "_watch", fresh)
    yield fresh
    for number, handler in fresh.before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_asks_and_reaches_the_handler_before(number: signal.Signals) -> None:
    received: list[int] = []
    before = signal.signal(number, lambda number, _: received.append(number))
    try:
        assert (preempted(), time_left()) == (False, None)
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert preempted()
        assert received == [number, number]
    finally:
        module._watch.before[number] = before


def test_a_terminals_signal_ends_the_program() -> None:
    before = signal.getsignal(signal.SIGINT)
    assert not preempted()
    assert signal.getsignal(signal.SIGINT) is before


def test_only_the_main_thread_can_begin() -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(CallerError, match="in the main thread"):
        pool.submit(preempted).result()
    assert not preempted()  # which still can


@pytest.mark.parametrize(
    ("environ", "least_s", "most_s"),
    [
        ({"TORCHELASTIC_RUN_ID": "a", SHUTDOWN_TIMEOUT: "500"}, 400, 500),
        ({"TORCHELASTIC_RUN_ID": "a", SHUTDOWN_TIMEOUT: "soon"}, 0, 30),
        ({"TORCHELASTIC_RUN_ID": "a", SHUTDOWN_TIMEOUT: "0"}, 0, 0),
        ({"SLURM_JOB_END_TIME": "+700"}, 600, 700),
        (
            {
                "SLURM_JOB_END_TIME": "+700",
                "TORCHELASTIC_RUN_ID": "a",
                SHUTDOWN_TIMEOUT: "900",
            },
            600,
            700,
        ),
    ],
)
def test_the_time_that_is_left(
    environ: dict[str, str], least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in environ.items():
        since_now = name.startswith("SLURM")
        monkeypatch.setenv(name, str(int(time.time()) + int(text)) if since_now else text)
    preempted()
    signal.raise_signal(signal.SIGUSR1)
    left_s = time_left()
    assert left_s is not None
    assert least_s <= left_s <= most_s


def test_nobody_knows_when() -> None:
    preempted()
    signal.raise_signal(signal.SIGUSR1)
    assert (preempted(), time_left()) == (True, None)


def test_a_forked_child_was_not_asked(watch: module._Watch) -> None:
    """The library's handler is back there."""
    preempted()
    signal.raise_signal(signal.SIGUSR1)
    handlers = dict(watch.before)
    watch.hold()
    assert {signal.SIGUSR1, signal.SIGTERM} <= set(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    watch.end_in_child()
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    assert time_left() is None
