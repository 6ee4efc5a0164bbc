"""Launches that are ended from outside: by signals, and by kill -9 of the launcher's processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_launch import GRANDCHILDREN

pytestmark = pytest.mark.system

UP = GRANDCHILDREN + "import os, pathlib; pathlib.Path('up.' + os.environ['RANK']).touch()\n"
SLEEPER = UP + "import time\ntime.sleep(600)\n"
STUBBORN = (
    "import signal\nfor number in (1, 2, 3, 15): signal.signal(number, signal.SIG_IGN)\n" + SLEEPER
)


@pytest.mark.everyday
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(launch: Launch, number: signal.Signals) -> None:
    process = launch.start("--standalone", "--nproc-per-node", "2", launch.script(SLEEPER))
    launch.wait_for("up.*", 2)
    assert len(launch.running()) >= 2 + 2 + 2  # launcher and guardian, workers, grandchildren
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    launch.expect_nothing_left()
    assert launch.left_files() == []
    assert f"rallypoint: stopped by {number.name} after " in launch.err


@pytest.mark.everyday
def test_workers_get_the_signal_and_their_time(launch: Launch) -> None:
    """They save for as long as the test wants."""
    script = launch.script("""
import os, pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path("saving." + os.environ["RANK"]).touch()
    while not os.path.exists("go"): time.sleep(0.01)
    pathlib.Path("saved." + os.environ["RANK"]).write_text(str(number))
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("up." + os.environ["RANK"]).touch()
while True: time.sleep(1)
""")
    process = launch.start("--nproc-per-node", "2", "--shutdown-timeout", "600", script)
    launch.wait_for("up.*", 2)
    process.terminate()
    launch.wait_for("saving.*", 2)
    (launch.directory / "go").touch()
    assert process.wait(60) == 143
    saved = [(launch.directory / f"saved.{rank}").read_text() for rank in range(2)]
    assert saved == ["15", "15"]


@pytest.mark.everyday
def test_a_worker_that_ignores_signals_is_killed_after_the_timeout(launch: Launch) -> None:
    process = launch.start(
        "--nproc-per-node", "2", "--shutdown-timeout", "0.5", launch.script(STUBBORN)
    )
    launch.wait_for("up.*", 2)
    begin = time.monotonic()
    process.terminate()
    assert process.wait(60) == 143
    assert time.monotonic() - begin >= 0.5
    launch.expect_nothing_left()


@pytest.mark.everyday
def test_a_second_interrupt_kills_at_once(launch: Launch) -> None:
    process = launch.start(
        "--verbose", "--nproc-per-node", "2", "--shutdown-timeout", "600", launch.script(STUBBORN)
    )
    launch.wait_for("up.*", 2)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: "stopping" in launch.err)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    launch.expect_nothing_left()


def test_a_suspended_worker_is_ended_too(launch: Launch) -> None:
    script = launch.script(UP + "os.kill(os.getpid(), 19)\n")
    process = launch.start("--nproc-per-node", "2", script)
    launch.wait_for("up.*", 2)
    process.terminate()
    assert process.wait(60) == 143


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
    assert process.wait(60) == 0
    assert len(list(launch.directory.glob("got.*"))) == 2


@pytest.mark.everyday
def test_a_hangup_that_is_ignored_stays_ignored(launch: Launch) -> None:
    """Else the launcher would say that it ended the job, as it comes first."""
    script = launch.script(SLEEPER)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = launch.start("--nproc-per-node", "1", script)
    finally:
        signal.signal(signal.SIGHUP, before)
    launch.wait_for("up.*")
    process.send_signal(signal.SIGHUP)
    process.terminate()
    assert process.wait(60) == 143


@pytest.mark.everyday
def test_kill_9_of_the_launcher_leaves_nothing(launch: Launch) -> None:
    process = launch.start("--nproc-per-node", "2", launch.script(STUBBORN))
    launch.wait_for("up.*", 2)
    process.kill()
    process.wait()
    launch.expect_nothing_left()
    assert launch.left_files() == []


@pytest.mark.everyday
def test_kill_9_of_the_guardian_is_told_and_leaves_nothing(launch: Launch) -> None:
    process = launch.start("--nproc-per-node", "2", launch.script(STUBBORN))
    launch.wait_for("up.*", 2)
    os.kill(launch.guardian_pid(), signal.SIGKILL)
    assert process.wait(60) == 1
    launch.expect_nothing_left()
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
    launch.expect_nothing_left()


# A launcher that ends at a named point of its start.
ENDS = """
import os, sys
from rallypoint.launch.agent import guardian, loop

def end_after(owner, name, calls):
    function = getattr(owner, name)
    def wrapped(*args, **named):
        nonlocal calls
        result = function(*args, **named)
        calls -= 1
        if calls == 0:
            open("ends", "w").close()
            os.kill(os.getpid(), {number})
        return result
    setattr(owner, name, wrapped)

end_after({owner}, {name!r}, {calls})
from rallypoint.cli import main
sys.argv[1:1] = ["run"]
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        ("loop", "Output", 1),
        ("guardian.Guardian", "__init__", 1),
        pytest.param("guardian.Guardian", "spawn", 2, marks=pytest.mark.everyday),
        ("guardian.Guardian", "spawn", 4),
    ],
    ids=["no guardian", "no worker", "two of four workers", "all workers"],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_end_during_the_start_leaves_nothing(
    launch: Launch, owner: str, name: str, calls: int, number: signal.Signals
) -> None:
    program = ENDS.format(owner=owner, name=name, calls=calls, number=int(number))
    words = ("--nproc-per-node", "4", launch.script(SLEEPER))
    assert launch.start(*words, launcher=("-c", program)).wait(60) in (-number, 128 + number)
    assert (launch.directory / "ends").exists()
    launch.expect_nothing_left()
