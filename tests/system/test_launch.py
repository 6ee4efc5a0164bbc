"""Jobs that end by themselves: what workers are given, and how each kind of failure is told."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

# Starts grandchildren that hide as well as a process can: own session, orphaned, signals ignored.
GRANDCHILDREN = """
import subprocess
hide = "trap '' TERM HUP INT; setsid sh -c 'trap \\"\\" TERM; (setsid sleep 600 &) ; sleep 601' &"
subprocess.Popen(["sh", "-c", hide + " sleep 602"])
"""

DUMP = """
import json, os, sys
json.dump(
    {"environ": dict(os.environ), "argv": sys.argv, "name": __name__, "cwd": os.getcwd(),
     "leads": os.getpgid(0) == os.getpid(), "fds": sorted(map(int, os.listdir("/proc/self/fd")))},
    open(f"dump.{os.environ['RANK']}", "w"),
)
"""


def failing(launch: Launch, how: str) -> str:
    """Rank 1 fails in this way when all are there; the others sleep; all have grandchildren."""
    text = (
        "import os, pathlib, signal, sys, time\n"
        + GRANDCHILDREN
        + "pathlib.Path('up.' + os.environ['RANK']).touch()\n"
        "if os.environ['RANK'] == '1':\n"
        "    while len(list(pathlib.Path('.').glob('up.*'))) < 3: time.sleep(0.01)\n"
        f"    pathlib.Path('failing').touch(); {how}\n"
        "time.sleep(600)\n"
    )
    return launch.script(text)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param(
            "raise ValueError('bad thing')",
            "rank 1 raised ValueError: bad thing",
            marks=pytest.mark.everyday,
        ),
        pytest.param(
            "os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL", marks=pytest.mark.everyday
        ),
        ("sys.exit('a word')", "rank 1 exited with code 1: a word"),
    ],
)
def test_the_first_failure_is_told_and_nothing_is_left(launch: Launch, how: str, told: str) -> None:
    flags = ("--standalone", "--nproc-per-node", "3", "--shutdown-timeout", "600")
    assert launch.start(*flags, failing(launch, how)).wait(120) == 1
    launch.expect_nothing_left()
    assert launch.left_files() == []
    assert launch.err.count("rallypoint: job failed: ") == 1
    assert f"rallypoint: job failed: {told}" in launch.err
    assert "stopped by the launcher: ranks 0, 2" in launch.err
    if "raise" in how:
        summary = launch.err.partition("rallypoint: ")[2]
        assert summary.count("Traceback (most recent call last)") == 1
        assert "raise ValueError('bad thing')" in summary


@pytest.mark.everyday(writer="the launcher")
def test_success_is_silent_and_leaves_nothing(launch: Launch) -> None:
    script = launch.script(GRANDCHILDREN)
    assert launch.run("--standalone", "--nproc-per-node", "2", script) == 0
    launch.expect_nothing_left()
    assert launch.left_files() == []
    assert (launch.out, launch.err) == ("", "")


@pytest.mark.everyday(writer="the launcher")
def test_workers_get_torchruns_variables_and_their_arguments(launch: Launch) -> None:
    arguments = ["--r=16", "--log", "x", "-m", "--nproc-per-node", "7", "--", "", "a b", "$HOME"]
    status = launch.run(
        "--nproc_per_node=2", launch.script(DUMP), *arguments, environ={"RANK": "9", "MINE": "1"}
    )
    assert status == 0
    (note,) = launch.err.splitlines()
    assert note.startswith("rallypoint run: --nproc-per-node is after ")
    dumps = [json.loads((launch.directory / f"dump.{rank}").read_text()) for rank in range(2)]
    for rank, dump in enumerate(dumps):
        environ = dump["environ"]
        assert dump["argv"][1:] == arguments
        assert dump["name"] == "__main__"
        assert dump["cwd"] == str(launch.directory)
        assert dump["leads"]
        # Control socket, flight record, memory for stacks, and the listing itself.
        assert dump["fds"] == [0, 1, 2, 3, 4, 5, 6]
        assert environ["MINE"] == "1"
        assert not {"RALLYPOINT_CONTROL_FD", "RALLYPOINT_FLIGHT_RECORD"} & environ.keys()
        assert "RALLYPOINT_LAUNCHERS_STDERR" not in environ
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1",
        }
        assert expected.items() <= environ.items()
        assert environ["TORCHELASTIC_ERROR_FILE"].endswith(f"/attempt_0/{rank}/error.json")
    for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert dumps[0]["environ"][name] == dumps[1]["environ"][name] != ""


def test_a_program_that_cannot_be_run_is_named(launch: Launch) -> None:
    launch.script("text", "plain.txt")
    assert launch.run("--nproc-per-node", "2", "--no-python", "./plain.txt") == 1
    assert "could not be started: cannot run './plain.txt': Permission denied" in launch.err
    assert launch.run("--nproc-per-node", "2", "--no-python", "no-such-program") == 1
    assert "cannot run 'no-such-program': No such file or directory" in launch.err


def test_a_huge_environment_and_command_line(launch: Launch) -> None:
    # Each line is one write: the workers share a standard output.
    script = launch.script(
        "import os, sys\nsys.stdout.write(f\"{len(os.environ['BIG_9'])} {len(sys.argv[-1])}\\n\")\n"
    )
    big = {f"BIG_{i}": "x" * 100_000 for i in range(10)}
    arguments = ["y" * 100_000] * 5
    assert launch.run("--nproc-per-node", "2", script, *arguments, environ=big) == 0
    assert launch.out == "100000 100000\n" * 2


def test_many_workers(launch: Launch) -> None:
    script = launch.script("import os; os.write(1, (os.environ['RANK'] + chr(10)).encode())")
    assert launch.run("--nproc-per-node", "40", script) == 0
    assert sorted(map(int, launch.out.split())) == list(range(40))


def test_without_a_temporary_directory_the_job_runs(launch: Launch) -> None:
    script = launch.script("import os; assert 'TORCHELASTIC_ERROR_FILE' not in os.environ")
    assert launch.run(script, environ={"TMPDIR": "/proc"}) == 0


@pytest.mark.everyday
@pytest.mark.needs_torch
def test_torchs_own_process_group_meets_at_the_agents_store(launch: Launch) -> None:
    script = launch.script("""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
assert total.item() == 3
dist.destroy_process_group()
""")
    assert launch.run("--nproc-per-node", "2", script) == 0


def test_nobody_can_read_the_help() -> None:
    command = [sys.executable, "-m", "rallypoint", "run", "--help"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "rallypoint: cannot write to the standard output: No space left on device\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_a_call_without_a_group_says_who_forms_groups(launch: Launch) -> None:
    script = launch.script("import rallypoint as dist; dist.barrier()")
    assert launch.run(script) == 1
    assert (
        "has not been initialized, please make sure to call init_process_group: the launcher starts"
        " the processes of a job, but they form process groups themselves." in launch.err
    )


def test_a_caught_exit_is_not_told(launch: Launch) -> None:
    text = "try:\n    sys.exit('caught')\nexcept SystemExit:\n    pass\n"
    assert launch.run(launch.script(f"import os, sys\n{text}sys.exit(3)")) == 1
    assert "job failed: rank 0 exited with code 3\n" in launch.err


def test_sys_exit_is_as_before(launch: Launch) -> None:
    script = launch.script(
        "import pickle, sys, threading\n"
        "assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit\n"
        "assert (sys.exit.__name__, sys.exit.__module__) == ('exit', 'sys')\n"
        "for status in (None, 0, 3, 'text', ('a', 'b')):\n"
        "    try:\n        sys.exit(status)\n"
        "    except SystemExit as error:\n        assert error.code == status\n"
        "sys.exit()\n"
    )
    assert launch.run(script) == 0, launch.err


@pytest.mark.everyday
@pytest.mark.exact
def test_an_error_of_all_ranks_is_told_once_with_them(launch: Launch) -> None:
    """By the launcher alone, and without its own frames. No rank ends before all have told it."""
    script = launch.script("""
import atexit, glob, time, numpy as np, rallypoint as dist
dist.init_process_group()
rank = dist.get_rank()
def wait_for_others():
    open(f"told.{rank}", "w")
    while len(glob.glob("told.*")) < 3:
        time.sleep(0.01)
atexit.register(wait_for_others)
dist.all_reduce(np.ones(4 + (rank == 2), np.float32))
""")
    assert launch.run("--nproc-per-node", "3", script) == 1
    assert launch.err.count("MismatchError") == 1, launch.err
    assert launch.err.count("ranks called different operations") == 1
    assert re.search(r"MismatchError: .* \(x3 ranks 0-2\)$", launch.err, re.MULTILINE)
    assert launch.err.count("Traceback") == 1
    assert "/rallypoint/" not in launch.err


@pytest.mark.everyday
def test_frames_of_ours_are_printed_if_asked_for(launch: Launch) -> None:
    script = launch.script("import rallypoint as dist; dist.barrier()")
    assert launch.run(script) == 1
    assert "/rallypoint/" not in launch.err
    assert launch.run(script, environ={"RALLYPOINT_FULL_TRACEBACKS": "1"}) == 1
    assert launch.err.count("/rallypoint/process_group/") >= 2


@pytest.mark.everyday
@pytest.mark.parametrize("closing", ["os.closerange(3, 4096)", "os.close(3)"])
def test_an_error_is_told_whatever_the_program_has_closed(launch: Launch, closing: str) -> None:
    script = launch.script(f"""
import os
{closing}
kept = [open(f"mine.{{number}}", "w") for number in range(3)]
raise ValueError("bad sample 17")
""")
    assert launch.run(script) == 1
    assert "job failed: rank 0 raised ValueError: bad sample 17\n" in launch.err
    assert "  traceback of rank 0:\n" in launch.err
    assert {path.read_text() for path in launch.directory.glob("mine.*")} == {""}
