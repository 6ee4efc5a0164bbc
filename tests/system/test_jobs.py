"""Commands about running jobs: ps, status, stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import blocks_tested_by
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

from rallypoint import cli

pytestmark = pytest.mark.system

WAITING = """
import os, time, numpy as np, rallypoint as dist
dist.init_process_group()
rank = dist.get_rank()
array = np.ones(8, np.float32)
for _ in range(5):
    dist.all_reduce(array)
open(f"ready.{rank}", "w")
if rank == 1:
    time.sleep(600)
dist.all_reduce(array)
"""


def rallypoint(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rallypoint", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def start_waiting_job(launch: Launch, *flags: str) -> str:
    """The process number of its launcher."""
    process = launch.start("--nproc-per-node", "3", *flags, launch.script(WAITING))
    launch.wait_for("ready.*", 3)
    return str(process.pid)


def is_printed(pattern: str, *words: str) -> bool:
    """Whether a command prints a line like this."""
    printed = rallypoint(*words).stdout
    print(printed)
    return re.search(pattern, printed, re.MULTILINE) is not None


def rows_of(pid: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in rallypoint("ps", "--json").stdout.splitlines()]
    return [row for row in rows if row["pid"] == int(pid)]


@pytest.mark.everyday
def test_a_job_is_listed_told_and_stopped(launch: Launch) -> None:
    """What does not answer at once, as it is not scheduled, is asked again."""
    pid = start_waiting_job(launch, "--rdzv-id", "my-job")
    expected = {"ranks": [0, 1, 2], "round": 0, "nodes": 1, "directory": str(launch.directory)}
    wait_until(lambda: [row.items() >= expected.items() for row in rows_of(pid)] == [True])
    wait_until(lambda: is_printed(rf"^\S+ +{pid} +0 of 1 +0-2 ", "ps"))

    # Lines of programs are noted where a call has waited for a while, which #4 may have.
    job = r"^job my-job: round 0, 3 ranks on 1 node; running, \d[\d.]* m?s after"
    wait_until(lambda: is_printed(job, "status", pid))
    waits = r"^ +0 +\S+ +\d+ .* all_reduce #5 for \d[\d.]* m?s +\S*worker\.py:11$"
    wait_until(lambda: is_printed(waits, "status", pid))
    sleeps = (
        r"^ +1 +\S+ +\d+  sleeps .* after all_reduce #4, \d[\d.]* m?s ago +\S*worker\.py:(7|10)$"
    )
    wait_until(lambda: is_printed(sleeps, "status", pid))

    wait_until(lambda: rallypoint("stop", pid).returncode in (0, 5))  # 5: it had heard it before
    assert launch.process is not None
    assert launch.process.wait(60) == 128 + signal.SIGTERM
    assert "stopped by `rallypoint stop` after" in launch.err
    assert rallypoint("status", pid).returncode == 5
    assert rows_of(pid) == []


def test_the_guides_commands(launch: Launch) -> None:
    """Other jobs may run here, so each command is given its job."""
    (block,) = blocks_tested_by("tests/system/test_jobs.py::test_the_guides_commands")
    flags = ("--nproc-per-node", "4", "--log-dir", "logs", "--redirects", "3")
    process = launch.start(*flags, launch.script(WAITING))
    launch.wait_for("ready.*", 4)
    told = {}
    follower: subprocess.Popen[bytes] | None = None
    for program, name, *words in block.commands():
        assert program == "rallypoint"
        job = [] if name == "ps" else [str(process.pid)]
        if "-f" in words:  # until the job ends
            command = [sys.executable, "-m", program, name, *words, *job]
            follower = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            continue
        done = rallypoint(name, *words, *job)
        assert done.returncode == 0, done.stderr
        told[name] = done.stdout
    assert set(told) == {"ps", "status", "stacks", "stop"}
    assert f" {process.pid} " in told["ps"]
    assert "4 ranks on 1 node" in told["status"]
    assert "worker.py" in told["stacks"]
    assert process.wait(60) == 128 + signal.SIGTERM
    assert follower is not None
    assert follower.wait(60) == 0


def test_of_several_jobs_one_must_be_named(launch: Launch, tmp_path: Path) -> None:
    directory = tmp_path / "other"
    directory.mkdir()
    other = Launch(directory)
    first, second = (start_waiting_job(each, "--rdzv-id", "twin") for each in (launch, other))
    try:
        refused = rallypoint("status")
        assert refused.returncode == 2
        assert first in refused.stderr
        assert second in refused.stderr
        assert rallypoint("status", first).returncode == 0
        assert rallypoint("stop", second).returncode == 0
    finally:
        assert other.process is not None
        other.process.kill()
        other.process.wait()
    assert launch.process is not None
    assert launch.process.poll() is None


def test_a_job_without_a_name_is_found_by_its_script(launch: Launch) -> None:
    pid = start_waiting_job(launch)
    ((name, run_id),) = [(row["name"], row["run_id"]) for row in rows_of(pid)]
    assert name == f"worker-{str(run_id)[:4]}"
    assert str(name) in rallypoint("ps", "--quiet").stdout.splitlines()
    for word in (str(name), str(run_id), str(run_id)[:6]):
        assert rallypoint("status", word).stdout.startswith(f"job {name}: round 0, 3 ranks")
    wait_until(lambda: rallypoint("stop", str(name)).returncode in (0, 5))
    assert launch.process is not None
    launch.process.wait(60)
    assert f"job {name} (process {pid}: " in rallypoint("explain", str(name)).stdout


@pytest.mark.everyday
def test_a_job_that_is_not_named_is_ended_only_if_somebody_says_so(launch: Launch) -> None:
    pid = start_waiting_job(launch, "--rdzv-id", "theirs\x1b[2J")
    shown = (
        rf"job theirs\\x1b\[2J \(process {pid}: worker\.py; 3 ranks on 1 node, "
        rf"started \d[\d.]* m?s ago in {launch.directory}\)"
    )
    refused = rallypoint("stop")
    assert (refused.returncode, refused.stdout) == (2, "")
    how = rf"rallypoint stop: name the job: `rallypoint stop {pid}` ends {shown}; --only ends the "
    assert re.match(how, refused.stderr), refused.stderr
    for answer in ("\n", "n\n", "maybe\n", ""):
        status, text = at_a_terminal("stop", answer=answer)
        assert status == 1
        assert re.match(rf"rallypoint stop: end {shown}\? \[y/N\] ", text), text
        assert "nothing was stopped" in text
    assert rows_of(pid) != []
    status, text = at_a_terminal("stop", "--no-wait", answer="y\n")
    assert status == 0, text
    assert launch.process is not None
    assert launch.process.wait(60) == 128 + signal.SIGTERM
    assert rallypoint("stop").returncode == 5
    assert rallypoint("stop", "--only").returncode == 5


def at_a_terminal(*words: str, answer: str) -> tuple[int, str]:
    """A command's exit status and output, where a person types that answer, or Ctrl-D if empty."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "rallypoint", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = ""
        while "[y/N] " not in text:
            text += os.read(ours, 1 << 16).decode()
        os.write(ours, answer.encode() or b"\x04")
        try:
            while data := os.read(ours, 1 << 16):
                text += data.decode()
        except OSError:  # the end
            pass
        status = process.wait(60)
    os.close(ours)
    return status, text


@pytest.mark.everyday
def test_scripts_end_the_only_job(launch: Launch, tmp_path: Path) -> None:
    start_waiting_job(launch)
    directory = tmp_path / "other"
    directory.mkdir()
    other = Launch(directory)
    start_waiting_job(other)
    try:
        refused = rallypoint("stop", "--only")
        assert refused.returncode == 2
        assert "several jobs run here; choose one by its name or pid" in refused.stderr
    finally:
        assert other.process is not None
        other.process.kill()
        other.process.wait()
    assert rallypoint("stop", "--only").returncode == 0
    assert launch.process is not None
    assert launch.process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("kill", "; did you mean stop?"),
        ("stp", "; did you mean top?"),  # it suggests nothing that ends something
        ("explian", "; did you mean explain?"),
        ("torchrun", "; did you mean run?"),
        ("zzz", "; the commands are: bench, "),
    ],
)
def test_other_commands(
    typed: str, meant: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rallypoint", typed])
    assert cli.main() == 2
    told = capsys.readouterr().err
    assert f"rallypoint: unknown command {typed}{meant}" in told
    assert ("stop?" in told) is (typed == "kill")


def test_an_agent_that_is_stopped_is_said_to_be(launch: Launch) -> None:
    pid = start_waiting_job(launch)
    os.kill(int(pid), signal.SIGSTOP)
    try:
        assert re.search(rf" {pid} .*does not answer", rallypoint("ps").stdout)
        refused = rallypoint("stop", pid)
        assert refused.returncode == 1
        assert "may be stopped or stuck" in refused.stderr
        assert f"kill -9 {pid}" in refused.stderr
    finally:
        os.kill(int(pid), signal.SIGCONT)


def test_nothing_of_a_killed_launcher_is_listed(launch: Launch) -> None:
    pid = start_waiting_job(launch)
    os.kill(int(pid), signal.SIGKILL)
    assert launch.process is not None
    launch.process.wait()
    assert rows_of(pid) == []
    assert rallypoint("status", pid).returncode == 5


@pytest.mark.everyday
def test_help_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("logs", "ps", "status", "stop"):
        monkeypatch.setattr("sys.argv", ["rallypoint", command, "--help"])
        assert cli.main() == 0
        assert capsys.readouterr().out.startswith(f"usage: rallypoint {command} ")
        monkeypatch.setattr("sys.argv", ["rallypoint", command, "--wrong"])
        assert cli.main() == 2


WRITING = """
import os, sys, time
rank = int(os.environ["RANK"])
for number in range(30):
    print(f"line {number} of {rank}", flush=True)
print(f"error of {rank}", file=sys.stderr, flush=True)
open(f"ready.{rank}", "w")
while not os.path.exists("go"):
    time.sleep(0.01)
print("the end", end="", flush=True)
"""


def test_logs_of_a_job_that_keeps_them(launch: Launch) -> None:
    process = launch.start(
        *("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "3"), launch.script(WRITING)
    )
    pid = str(process.pid)
    launch.wait_for("ready.*", 2)
    of_one = rallypoint("logs", pid, "--rank", "1", "-n", "3")
    assert of_one.stdout == "line 27 of 1\nline 28 of 1\nline 29 of 1\n"
    assert of_one.stderr == "error of 1\n"
    of_all = rallypoint("logs", "-n0", pid).stdout.splitlines()
    assert of_all == [f"[{rank}] line {i} of {rank}" for rank in range(2) for i in range(30)]
    command = [sys.executable, "-m", "rallypoint", "logs", "-f", "-r0", "-n1", pid]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == "line 29 of 0\n"
        (launch.directory / "go").touch()
        assert follower.stdout.read() == "the end\n"
    assert process.wait(60) == 0


def test_logs_of_a_job_that_has_failed(launch: Launch) -> None:
    flags = ("--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "3")
    script = (
        "import os, time\nprint('line', flush=True)\n1 / int(os.environ['RANK'])\ntime.sleep(60)\n"
    )
    process = launch.start(*flags, launch.script(script))
    assert process.wait(60) == 1
    done = rallypoint("logs", str(process.pid), "--rank", "0", "--tail", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "line\n"
    assert f"has ended; its logs: {launch.directory / 'logs'}/" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_logs_of_a_job_that_keeps_none(launch: Launch) -> None:
    refused = rallypoint("logs", start_waiting_job(launch))
    assert refused.returncode == 1
    assert "--log-dir DIR --redirects 3" in refused.stderr
