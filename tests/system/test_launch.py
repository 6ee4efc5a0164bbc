"""Jobs that end by themselves: what workers are given, and how each kind of failure is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import SOON_S
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
        ("raise ValueError('bad thing')", "rank 1 raised ValueError: bad thing"),
        ("sys.exit(3)", "rank 1 exited with code 3"),
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
        ("os.abort()", "rank 1 was killed by SIGABRT"),
        ("sys.exit('a word')", "rank 1 exited with code 1: a word"),
    ],
)
def test_the_first_failure_is_told_and_nothing_is_left(launch: Launch, how: str, told: str) -> None:
    process = launch.start("--standalone", "--nproc-per-node", "3", failing(launch, how))
    launch.wait_for("failing")
    begin = time.monotonic()
    assert process.wait(30) == 1
    assert time.monotonic() - begin < SOON_S
    assert launch.left_over() == []
    assert launch.left_files() == []
    assert launch.err.count("rallypoint: ") == 1
    assert f"rallypoint: job failed: {told}" in launch.err
    assert "stopped by the launcher: ranks 0, 2" in launch.err
    if "raise" in how:
        summary = launch.err.partition("rallypoint: ")[2]
        assert summary.count("Traceback (most recent call last)") == 1
        assert "raise ValueError('bad thing')" in summary


def test_success_is_silent_and_leaves_nothing(launch: Launch) -> None:
    script = launch.script(GRANDCHILDREN)
    assert launch.run("--standalone", "--nproc-per-node", "2", script) == 0
    assert launch.left_over() == []
    assert launch.left_files() == []
    assert (launch.out, launch.err) == ("", "")


def test_workers_get_torchruns_variables_and_their_arguments(launch: Launch) -> None:
    arguments = ["--r=16", "--log", "x", "-m", "--nproc-per-node", "7", "--", "", "a b", "$HOME"]
    status = launch.run(
        "--nproc_per_node=2", launch.script(DUMP), *arguments, environ={"RANK": "9", "MINE": "1"}
    )
    assert (status, launch.err) == (0, "")
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


@pytest.mark.needs_torch
def test_the_variables_are_those_of_torchrun(launch: Launch) -> None:
    def names_of(*command: str) -> set[str]:
        done = subprocess.run(
            [*command, "--standalone", "--nproc-per-node", "2", "--no-python", "env", "-0"],
            capture_output=True,
            check=True,
            text=True,
        )
        return {entry.partition("=")[0] for entry in done.stdout.split("\0") if entry}

    theirs = names_of(sys.executable, "-m", "torch.distributed.run")
    ours = names_of(sys.executable, "-m", "rallypoint", "run")
    assert ours - theirs == {"RALLYPOINT_CONTROL_FD", "RALLYPOINT_FLIGHT_RECORD"}
    assert theirs <= ours


def test_module_run_path_and_other_programs(launch: Launch) -> None:
    launch.script("import sys; print('module', sys.argv[1:])", "mod.py")
    assert launch.run("-m", "mod", "a", environ={"PYTHONPATH": str(launch.directory)}) == 0
    assert launch.out == "module ['a']\n"
    path = launch.script("import sys; print(__name__, sys.argv)")
    assert launch.run("--run-path", path, "--b") == 0
    assert launch.out == f"__main__ ['{path}', '--b']\n"
    assert launch.run("--no-python", "sh", "-c", "echo $0 $RANK ${local_rank}", "x") == 0
    assert launch.out == "x 0 0\n"


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


def test_torchs_error_file_is_read(launch: Launch) -> None:
    # -S: no site, and so no hook of ours in the worker.
    code = (
        "import json, os; json.dump({'message': {'message': 'RuntimeError: it broke', 'extraInfo':"
        " {'py_callstack': 'the stack'}}}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'));"
        "os._exit(1)"
    )
    assert launch.run("--no-python", sys.executable, "-S", "-c", code) == 1
    assert "rank 0 raised RuntimeError: it broke" in launch.err
    assert "the stack" in launch.err


def test_an_echo_is_not_the_cause(launch: Launch) -> None:
    script = launch.script("""
import os, sys, time
from rallypoint.base.errors import PeerLostError
if os.environ["RANK"] == "0":
    raise PeerLostError("lost rank 1")
time.sleep(0.15)  # rank 1 closed its connections first, and ends last
sys.exit(3)
""")
    assert launch.run("--nproc-per-node", "2", script) == 1
    assert "job failed: rank 1 exited with code 3" in launch.err
    assert "also failed: rank 0 raised rallypoint.base.errors.PeerLostError: lost" in launch.err


def test_many_workers(launch: Launch) -> None:
    script = launch.script("import os; os.write(1, (os.environ['RANK'] + chr(10)).encode())")
    assert launch.run("--nproc-per-node", "40", script) == 0
    assert sorted(map(int, launch.out.split())) == list(range(40))


def test_without_a_temporary_directory_the_job_runs(launch: Launch) -> None:
    script = launch.script("import os; assert 'TORCHELASTIC_ERROR_FILE' not in os.environ")
    assert launch.run(script, environ={"TMPDIR": "/proc"}) == 0


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


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["simulate", "--help"]])
def test_nobody_can_read_the_help(words: list[str]) -> None:
    command = [sys.executable, "-m", "rallypoint", *words]
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
