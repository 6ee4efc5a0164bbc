"""Workers that make it hard to end them, and many launches at once."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from tests.system.conftest import Launch
from tests.system.test_launch import GRANDCHILDREN

pytestmark = pytest.mark.system

CULPRIT = """
import os, pathlib, signal, subprocess, sys, time
def is_up():
    pathlib.Path("up." + os.environ["RANK"]).touch()
if os.environ["RANK"] == "0":
    while not os.path.exists("up.1"): time.sleep(0.01)
    os.abort()
"""
PREFIX, TEE = "--log-prefix {rank}:", "--tee 3 --log-dir logs"
STOPS = "subprocess.Popen(['sh', '-c', f'kill -STOP {os.getpid()}; touch up.1']).wait()"


@pytest.mark.parametrize(
    ("text", "least_s", "flags"),
    [
        pytest.param(
            *("signal.signal(signal.SIGTERM, signal.SIG_IGN); is_up(); time.sleep(600)", 1.0),
            PREFIX,
            id="ignores TERM",
            marks=pytest.mark.everyday,
        ),
        pytest.param(STOPS, 0.0, TEE, id="stopped", marks=pytest.mark.everyday),
        pytest.param("is_up()\nwhile True: print('x' * 10000)", 0.0, PREFIX, id="fills stdout"),
        pytest.param("is_up()\nwhile True: print('x' * 10000)", 0.0, TEE, id="fills a file"),
        pytest.param(
            "os.close(1); os.close(2); is_up(); time.sleep(600)", 0.0, TEE, id="closes stdout"
        ),
        pytest.param(
            GRANDCHILDREN + "is_up(); os._exit(0)",
            0.0,
            PREFIX,
            id="leaves grandchildren",
            marks=pytest.mark.everyday,
        ),
    ],
)
def test_each_ends_and_nothing_is_left(
    launch: Launch, text: str, least_s: float, flags: str
) -> None:
    words = ["--nproc-per-node", "2", "--shutdown-timeout", "1", *flags.split()]
    process = launch.start(*words, launch.script(CULPRIT + text))
    assert process.wait(60) == 1
    assert least_s <= time.time() - (launch.directory / "up.1").stat().st_mtime
    launch.expect_nothing_left()
    assert launch.left_files() == []
    assert "job failed: rank 0 was killed by SIGABRT" in launch.err


ABORTS = """
import os, sys
sys.stderr.write("Check failed: a != b\\nstack\\n")
os.abort()
"""


@pytest.mark.parametrize("flags", ["--tee 3", "--redirects 3", ""])
def test_what_a_worker_wrote_before_it_aborted(launch: Launch, flags: str) -> None:
    kept = ["--log-dir", str(launch.directory / "logs")] if flags else []
    process = launch.start(*flags.split(), *kept, launch.script(ABORTS))
    assert process.wait(60) == 1
    if flags:
        assert "its stderr ends with: Check failed: a != b" in launch.err
    else:
        assert "its last lines on stderr, above, may say why" in launch.err


@pytest.mark.everyday
def test_a_worker_that_leaves_grandchildren_succeeds(launch: Launch) -> None:
    assert launch.run(launch.script(GRANDCHILDREN)) == 0
    launch.expect_nothing_left()


def test_fifty_launches_at_once(launch: Launch) -> None:
    script = launch.script("""
import os, sys
from rallypoint.store.client import TCPStore
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
assert store.add("workers", 1) <= 2
store.set(os.environ["RANK"], os.environ["TORCHELASTIC_RUN_ID"])
mine = os.environ["TORCHELASTIC_RUN_ID"].encode()
assert [store.get("0"), store.get("1")] == [mine, mine]
""")
    command = [sys.executable, "-m", "rallypoint", "run", "--standalone", "--nproc-per-node", "2"]
    processes = [
        subprocess.Popen([*command, script], stderr=subprocess.PIPE, cwd=launch.directory)
        for _ in range(50)
    ]
    results = [(process.communicate(timeout=100)[1], process.returncode) for process in processes]
    assert results == [(b"", 0)] * 50


FORMING = """
import os, pathlib, time, numpy as np, rallypoint as dist
rank = int(os.environ["RANK"])
pathlib.Path(f"up.{rank}").touch()
while rank == 1 and not os.path.exists("go"):
    time.sleep(0.01)
dist.init_process_group()
array = np.ones(4)
dist.all_reduce(array)
assert array[0] == 2
"""


def test_a_launcher_that_does_not_run_while_a_group_forms_fails_nothing(launch: Launch) -> None:
    """Its store answers nobody; the workers' timeout is far away."""
    process = launch.start("--nproc-per-node", "2", launch.script(FORMING))
    launch.wait_for("up.*", 2)
    time.sleep(2)  # rank 0 waits in steps
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(13)
        (launch.directory / "go").touch()
        time.sleep(1)
    finally:
        process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0, launch.err
    assert "job failed" not in launch.err
