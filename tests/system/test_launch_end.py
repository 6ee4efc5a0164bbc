"""Launches that are ended from outside: by signals, and by kill -9 of the launcher's processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.system.conftest import Launch
from tests.system.test_launch import GRANDCHILDREN

pytestmark = pytest.mark.system

UP = GRANDCHILDREN + "import os, pathlib; pathlib.Path('up.' + os.environ['RANK']).touch()\n"
SLEEPER = UP + "import time\ntime.sleep(600)\n"
STUBBORN = (
    "import signal\nfor number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\n" + SLEEPER
)


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_a_signal_ends_everything(launch: Launch, number: signal.Signals, status: int) -> None:
    process = launch.start("--standalone", "--nproc-per-node", "2", launch.script(SLEEPER))
    launch.wait_for("up.*", 2)
    assert len(launch.running()) >= 2 + 2 + 2  # launcher and guardian, workers, grandchildren
    process.send_signal(number)
    assert process.wait(30) == status
    assert launch.left_over() == []
    assert launch.left_files() == []
    assert f"rallypoint: stopped by {number.name} after " in launch.err


def test_workers_get_the_signal_and_their_time(launch: Launch) -> None:
    script = launch.script("""
import os, pathlib, signal, sys, time
def save(number, frame):
    time.sleep(0.3)
    pathlib.Path("saved." + os.environ["RANK"]).write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("up." + os.environ["RANK"]).touch()
while True: time.sleep(1)
""")
    process = launch.start("--nproc-per-node", "2", script)
    launch.wait_for("up.*", 2)
    process.terminate()
    assert process.wait(30) == 143
    saved = [(launch.directory / f"saved.{rank}").read_text() for rank in range(2)]
    assert saved == ["15", "15"]


def test_a_worker_that_ignores_signals_is_killed_after_the_timeout(launch: Launch) -> None:
    process = launch.start(
        "--nproc-per-node", "2", "--shutdown-timeout", "0.5", launch.script(STUBBORN)
    )
    launch.wait_for("up.*", 2)
    begin = time.monotonic()
    process.terminate()
    assert process.wait(30) == 143
    assert time.monotonic() - begin >= 0.5
    assert launch.left_over() == []


def test_a_second_interrupt_kills_at_once(launch: Launch) -> None:
    process = launch.start(
        "--verbose", "--nproc-per-node", "2", "--shutdown-timeout", "600", launch.script(STUBBORN)
    )
    launch.wait_for("up.*", 2)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 30
    while "stopping" not in launch.err and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert launch.left_over() == []


def test_who_is_waited_for_is_told(launch: Launch) -> None:
    process = launch.start("--nproc-per-node", "2", launch.script(STUBBORN))
    launch.wait_for("up.*", 2)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 30
    while "waiting" not in launch.err and time.monotonic() < deadline:
        time.sleep(0.01)
    assert launch.err == (
        "rallypoint: waiting up to 29 s more for ranks 0-1 to end; a second interrupt (Ctrl-C)"
        " kills them\n"
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


def test_a_suspended_worker_is_ended_too(launch: Launch) -> None:
    script = launch.script(UP + "os.kill(os.getpid(), 19)\n")
    process = launch.start("--nproc-per-node", "2", script)
    launch.wait_for("up.*", 2)
    process.terminate()
    assert process.wait(10) == 143


def test_user_signals_are_passed_on_and_stop_nothing(launch: Launch) -> None:
    script = launch.script("""
import os, pathlib, signal, time
signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path("got." + os.environ["RANK"]).touch())
pathlib.Path("up." + os.environ["RANK"]).touch()
while not os.path.exists("got." + os.environ["RANK"]): time.sleep(0.01)
""")
    process = launch.start("--nproc-per-node", "2", script)
    launch.wait_for("up.*", 2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 0
    assert len(list(launch.directory.glob("got.*"))) == 2


def test_a_hangup_that_is_ignored_stays_ignored(launch: Launch) -> None:
    script = launch.script(SLEEPER)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = launch.start("--nproc-per-node", "1", script)
    finally:
        signal.signal(signal.SIGHUP, before)
    launch.wait_for("up.*")
    process.send_signal(signal.SIGHUP)
    with pytest.raises(Exception, match="timed out"):
        process.wait(0.5)
    process.terminate()
    assert process.wait(30) == 143


def test_kill_9_of_the_launcher_leaves_nothing(launch: Launch) -> None:
    process = launch.start("--nproc-per-node", "2", launch.script(STUBBORN))
    launch.wait_for("up.*", 2)
    process.kill()
    process.wait()
    assert launch.left_over(within_s=2.0) == []
    assert launch.left_files() == []


def test_kill_9_of_a_suspended_launcher_leaves_nothing(launch: Launch) -> None:
    process = launch.start("--nproc-per-node", "2", launch.script(STUBBORN))
    launch.wait_for("up.*", 2)
    process.send_signal(signal.SIGSTOP)
    process.kill()
    process.wait()
    assert launch.left_over(within_s=2.0) == []


def test_kill_9_of_the_guardian_is_told_and_leaves_nothing(launch: Launch) -> None:
    process = launch.start("--nproc-per-node", "2", launch.script(STUBBORN))
    launch.wait_for("up.*", 2)
    os.kill(launch.guardian_pid(), signal.SIGKILL)
    assert process.wait(30) == 1
    assert launch.left_over(within_s=2.0) == []
    assert "guardian process was killed, and all workers died with it" in launch.err


def test_kill_9_of_both_still_ends_the_workers(launch: Launch) -> None:
    text = STUBBORN.replace(GRANDCHILDREN, "")  # these nobody is left to find
    process = launch.start("--nproc-per-node", "2", launch.script(text))
    launch.wait_for("up.*", 2)
    guardian = launch.guardian_pid()
    process.send_signal(signal.SIGSTOP)
    os.kill(guardian, signal.SIGKILL)
    process.kill()
    process.wait()
    assert launch.left_over(within_s=2.0) == []


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.03, 0.04, 0.05, 0.06])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_end_during_the_start_leaves_nothing(
    launch: Launch, delay_s: float, number: signal.Signals
) -> None:
    process = launch.start("--nproc-per-node", "4", launch.script(SLEEPER))
    time.sleep(delay_s)
    process.send_signal(number)
    assert process.wait(30) != 0
    assert launch.left_over(within_s=2.0) == []
