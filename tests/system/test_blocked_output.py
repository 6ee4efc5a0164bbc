"""Somebody has stopped reading what a launcher writes: that costs output, and nothing else."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

pytestmark = pytest.mark.system

RUN = (sys.executable, "-m", "rallypoint", "run")
READY = "import pathlib, time\npathlib.Path('ready').touch()\ntime.sleep(600)\n"


@pytest.fixture
def full_pipe() -> Iterator[tuple[int, int]]:
    """A pipe that takes nothing more: its two ends."""
    reading, writing = os.pipe()
    fill(writing)
    yield reading, writing
    os.close(reading)
    os.close(writing)


def fill(writing: int) -> None:
    own = os.open(f"/proc/self/fd/{writing}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        while True:
            os.write(own, b"." * 4096)
    except BlockingIOError:
        os.close(own)


def start(launch: Launch, *words: str, out: int, err: int) -> subprocess.Popen[bytes]:
    launch.process = subprocess.Popen(
        [*RUN, *words],
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=err,
        cwd=launch.directory,
        env={**os.environ, "TMPDIR": str(launch.directory)},
    )
    return launch.process


@pytest.mark.everyday
def test_a_signal_ends_a_launcher_whose_stderr_is_a_full_pipe(
    launch: Launch, full_pipe: tuple[int, int]
) -> None:
    script = launch.script(READY)
    flags = ("--verbose", "--event-log-handler", "console", "-r", "3", "--log-dir", "l")
    process = start(launch, *flags, script, out=full_pipe[1], err=full_pipe[1])
    launch.wait_for_file("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


def test_a_signal_ends_a_launcher_at_a_stopped_terminal(launch: Launch) -> None:
    leader, follower = pty.openpty()
    os.write(leader, b"\x13")  # Ctrl-S
    wait_until(lambda: not select.select([], [follower], [], 0)[1])
    script = launch.script(READY)
    process = start(launch, "--verbose", script, out=follower, err=follower)
    launch.wait_for_file("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    os.write(leader, b"\x11")
    os.close(follower)
    os.close(leader)


def test_a_new_round_begins_though_nobody_reads_the_last_ones_output(
    launch: Launch, full_pipe: tuple[int, int]
) -> None:
    """Teed, so that it lies in a file, and is shown in order once somebody reads."""
    script = launch.script(
        "import os, pathlib, sys\n"
        "number = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "for i in range(20000): print(f'{number} {i:06} {\"x\" * 60}')\n"
        "pathlib.Path('round.' + number).touch()\n"
        "sys.exit(number == '0')\n"
    )
    reading, writing = full_pipe
    flags = ("--tee", "1", "--log-dir", "l", "--max-restarts", "1")
    process = start(launch, *flags, script, out=writing, err=subprocess.DEVNULL)
    launch.wait_for_file("round.1")
    os.set_blocking(reading, False)
    data = bytearray()
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        select.select([reading], [], [], 0.1)
        try:
            data += os.read(reading, 1 << 16)
        except BlockingIOError:
            continue
    assert process.wait(60) == 0
    while select.select([reading], [], [], 0)[0]:
        data += os.read(reading, 1 << 16)
    lines = data.lstrip(b".").decode().splitlines()
    assert lines == [
        f"[default0]:{number} {i:06} {'x' * 60}" for number in range(2) for i in range(20000)
    ]


def test_a_launcher_does_not_wait_for_ever_for_a_reader_at_the_end(
    launch: Launch, full_pipe: tuple[int, int]
) -> None:
    script = launch.script("print('never read')")
    code = (
        "import sys\n"
        "from rallypoint.launch.agent import loop as agent\n"
        "agent._PATIENCE_S = 0.5\n"
        "from rallypoint.cli import main\n"
        "sys.argv[1:1] = ['run']\n"
        "sys.exit(main())\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--log-prefix", "{rank}: ", script], stdout=full_pipe[1]
    )
    assert process.wait(60) == 0


def test_a_journal_that_nobody_reads(launch: Launch) -> None:
    """A named pipe, the nearest thing to a file system that hangs."""
    path = launch.directory / "events"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writing = os.open(path, os.O_WRONLY)
    fill(writing)
    script = launch.script(READY)
    process = start(
        launch, "--json-events", str(path), script, out=subprocess.DEVNULL, err=subprocess.DEVNULL
    )
    launch.wait_for_file("ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    os.close(reading)
    os.close(writing)


def test_a_guardian_that_is_stopped_does_not_stop_the_launcher(launch: Launch) -> None:
    """Its requests wait; a signal ends both, in the time that a hanging guardian is given."""
    script = launch.script(READY)
    process = launch.start("--nproc-per-node", "2", "--shutdown-timeout", "1", script)
    launch.wait_for("ready")
    guardian = launch.guardian_pid()
    os.kill(guardian, signal.SIGSTOP)
    for _ in range(3000):  # more than its socket holds
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.0002)
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(60) == 1
    finally:
        if process.poll() is None:
            os.kill(guardian, signal.SIGCONT)
    assert "guardian process did not answer for 8 s" in launch.err


# A launcher whose log files are on a file system that hangs: named pipes, which nobody reads.
HUNG = """
import os, sys
from rallypoint.launch.output import tee

def open_log(path):
    os.mkfifo(path)
    return os.open(path, os.O_RDWR)

tee.open_log = open_log
from rallypoint.cli import main
sys.argv[1:1] = ['run']
sys.exit(main())
"""


def test_log_files_that_hang_cost_no_heartbeat(launch: Launch, free_port: int) -> None:
    """The node stays in the job beside another one, shows what it can, and obeys a signal."""
    script = launch.script(
        "import os, pathlib, sys, time\n"
        "print('the first line', flush=True)\n"
        "while 'the first line' not in open('shown.txt').read(): time.sleep(0.01)\n"
        "for i in range(400): print('x' * 999)\n"
        "sys.stdout.flush()\n"
        "pathlib.Path('done.' + os.environ['GROUP_RANK']).touch()\n"
        "time.sleep(600)\n"
    )
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}")
    flags = ("--nnodes", "2", "--rdzv-id", "j", *where)
    tee = ("--tee", "3", "--log-dir", "hung")
    environ = {**os.environ, "TMPDIR": str(launch.directory), "RALLYPOINT_TOKEN": "secret"}
    said = [(launch.directory / f"{name}.txt").open("wb") for name in ("sound", "hung", "shown")]
    sound = launch.process = subprocess.Popen(
        [*RUN, *flags, "--rdzv-conf", "is_host=1", "-r", "3", "--log-dir", "sound", script],
        cwd=launch.directory,
        stderr=said[0],
        env=environ,
    )
    hung = subprocess.Popen(
        [sys.executable, "-c", HUNG, *flags, *("--rdzv-conf", "is_host=0"), *tee, script],
        cwd=launch.directory,
        stdout=said[2],
        stderr=said[1],
        env=environ,
    )
    try:
        launch.wait_for("done.*")
        time.sleep(8)  # longer than the 5 s after which a silent node is lost
        assert [sound.poll(), hung.poll()] == [None, None]
        assert "lost" not in (launch.directory / "sound.txt").read_text()
        assert "silent" not in (launch.directory / "sound.txt").read_text()
        assert "the first line" in (launch.directory / "shown.txt").read_text()
        hung.send_signal(signal.SIGTERM)
        assert hung.wait(60) == 143
    finally:
        for process in (sound, hung):
            process.terminate()
            process.wait(60)
        for file in said:
            file.close()


def test_an_error_file_that_is_a_pipe_is_not_waited_for(launch: Launch) -> None:
    script = launch.script(
        "import os, sys\nos.mkfifo(os.environ['TORCHELASTIC_ERROR_FILE'])\nsys.exit(7)\n"
    )
    process = launch.start("--log-dir", "l", "-r", "3", script)
    assert process.wait(60) == 1
    assert "exited with code 7" in launch.err
