"""Signals that Slurm may have sent to the workers itself: sent by the agent only if it did not."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from rallypoint.launch.agent.step_signals import HELD_S, StepSignals

TERM, USR1, CONT = signal.SIGTERM, signal.SIGUSR1, signal.SIGCONT


class Sent:
    """A step's signals, and what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[tuple[int, ...], int]] = []
        self.signals = StepSignals(lambda ranks, number: self.sent.append((ranks, number)))

    def everything(self, number: int) -> None:
        """As slurmstepd does."""
        os.kill(self.signals._probe._pid, number)


@pytest.fixture
def step() -> Iterator[Sent]:
    step = Sent()
    yield step
    step.signals.close()


def test_what_only_the_agent_got_is_passed_on(step: Sent) -> None:
    step.signals.send((0, 1), TERM, 10.0)
    assert step.signals.wake_at == 10.0 + HELD_S
    step.signals.tick(10.0 + HELD_S / 2)
    assert step.sent == []
    step.signals.tick(10.0 + HELD_S)
    assert step.sent == [((0, 1), TERM)]
    assert step.signals.wake_at is None


@pytest.mark.parametrize("is_early", [True, False])
def test_what_everything_got_is_not_sent_again(step: Sent, is_early: bool) -> None:
    if is_early:
        step.everything(TERM)
    step.signals.send((0,), TERM, 10.0)
    if not is_early:
        step.everything(TERM)
    step.signals.tick(11.0)
    assert step.sent == []


def test_each_signal_counts_for_itself_and_once(step: Sent) -> None:
    step.everything(USR1)
    step.signals.send((0,), USR1, 10.0)
    step.signals.send((0,), USR1, 10.1)
    step.signals.send((0,), TERM, 10.2)
    step.signals.tick(10.0 + HELD_S)
    assert step.sent == []
    step.signals.tick(11.0)
    assert step.sent == [((0,), TERM)]
    step.signals.send((0,), USR1, 12.0)
    step.signals.tick(13.0)
    assert step.sent[1:] == [((0,), USR1)]


def test_a_suspended_worker_goes_on_at_once(step: Sent) -> None:
    step.everything(CONT)
    step.signals.send((0,), CONT, 10.0)
    assert step.sent == [((0,), CONT)]


def test_workers_that_have_ended_are_forgotten(step: Sent) -> None:
    step.signals.send((0,), TERM, 10.0)
    step.signals.forget()
    step.signals.tick(11.0)
    assert (step.sent, step.signals.wake_at) == ([], None)


def test_the_probe_ends_with_its_agent_however_that_ends() -> None:
    code = (
        "import os; from rallypoint.launch.agent.step_signals import SignalProbe;"
        " probe = SignalProbe(); print(probe._pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    try:
        probe = os.pidfd_open(int(done.stdout))
    except ProcessLookupError:
        return
    select.select([probe], [], [])
    os.close(probe)
