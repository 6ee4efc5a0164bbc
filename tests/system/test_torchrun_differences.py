"""Each difference of docs/torchrun-differences.md: our side always, torchrun's if it is there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.conftest import OURS, Launch
from tests.system.test_torchrun_conformance import DUMP, TORCHRUN

from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import parse

pytestmark = pytest.mark.system

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/torchrun-differences.md"
needs_torch = pytest.mark.needs_torch

# Differences that are tests of other files.
ELSEWHERE = {
    "abbreviations": "unit/cli/test_run.py::test_wrong_flags",
    "missing_script": "unit/cli/test_run.py::test_wrong_use_gets_one_sentence_and_exit_2",
    "unknown_signal": "unit/cli/test_run.py::test_wrong_use_gets_one_sentence_and_exit_2",
    "run_path": "unit/cli/test_run.py::test_wrong_use_gets_one_sentence_and_exit_2",
    "standalone": "unit/cli/test_run.py::test_wrong_use_gets_one_sentence_and_exit_2",
    "master_address": "test_launch.py::test_workers_get_torchruns_variables_and_their_arguments",
    "empty_store": "test_restart.py::test_each_round_has_an_empty_store_on_a_port_of_its_own",
    "undecorated": "test_launch.py::test_the_first_failure_is_told_and_nothing_is_left",
    "signals": "test_launch_end.py::test_a_signal_ends_everything",
    "user_signals": "test_launch_end.py::test_user_signals_are_passed_on_and_stop_nothing",
    "start_up_failures": (
        "test_restart.py::test_a_failure_before_the_programs_work_is_not_tried_again"
    ),
    "no_leftovers": "test_launch.py::test_success_is_silent_and_leaves_nothing",
    "told": "test_torchrun_logs.py::test_the_logs_are_named_at_the_start_and_in_the_last_line",
}


def names() -> set[str]:
    """The page's names in brackets, as names of functions."""
    text = PAGE.read_text().replace("\n", " ")
    return {re.sub("[ -]", "_", name) for name in re.findall(r"\[([a-z -]+)\]", text)}


@pytest.mark.everyday
def test_every_difference_has_its_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert names() <= tested | ELSEWHERE.keys()
    for place in ELSEWHERE.values():
        file, _, test = place.partition("::")
        folder = TESTS if "/" in file else TESTS / "system"
        assert f"\ndef {test}(" in (folder / file).read_text(), place


def seen(launch: Launch) -> dict[str, object]:
    (path,) = launch.directory.glob("seen.*")
    found = json.loads(path.read_text())
    path.unlink()
    assert isinstance(found, dict)
    return found


@needs_torch
def test_torchrun_is_as_the_page_says(launch: Launch) -> None:
    """Several of its lines in one launch: a start of torchrun's takes seconds."""
    launch.script(DUMP, "dump.py")
    flags = ["--max-rest", "1", "--signals-to-handle", "SIGNONE,SIGTERM"]
    words = ["$local_rank", "$$", "$${local_rank}", "${local_rank}"]
    assert launch.run(*flags, "dump.py", *words, launcher=TORCHRUN) == 0
    last = seen(launch)
    assert last["argv"][1:] == ["0", "$", "${local_rank}", "0"]  # type: ignore[index]
    assert last["environ"]["TORCHELASTIC_MAX_RESTARTS"] == "1"  # type: ignore[index]
    assert last["environ"]["MASTER_ADDR"] == "localhost"  # type: ignore[index]
    assert list(launch.directory.glob("torchelastic_*"))


def test_dollars(launch: Launch) -> None:
    launch.script(DUMP, "dump.py")
    words = ["$local_rank", "$$", "$${local_rank}", "${local_rank}"]
    assert launch.run("dump.py", *words) == 0
    assert seen(launch)["argv"][1:] == ["$local_rank", "$$", "${local_rank}", "0"]  # type: ignore[index]


def test_standard_input(launch: Launch) -> None:
    """Several workers, and restarts, are wrong use: tests/unit/cli/test_run.py."""
    result = subprocess.run(
        [sys.executable, *OURS, "-", "word"],
        input="import os, sys; print(sys.argv, os.environ['RANK'])",
        capture_output=True,
        text=True,
        check=False,
        cwd=launch.directory,
    )
    assert (result.returncode, result.stdout) == (0, "['-', 'word'] 0\n")


@pytest.mark.everyday
def test_empty_variables() -> None:
    options, _ = parse(["x"], RunOptions, program="", environ={"PET_ROLE": "", "PET_NNODES": ""})
    assert options.texts == {}


def test_meaningless_flags(launch: Launch) -> None:
    flags = ["--monitor-interval", "5", "--start-method", "fork"]
    assert launch.run(*flags, launch.script("")) == 0
    assert launch.err == ""
    assert launch.run(*flags, "--verbose", launch.script("")) == 0
    assert "--monitor-interval has no effect" in launch.err
    assert "--start-method fork has no effect" in launch.err


def test_plug_ins(launch: Launch) -> None:
    """Others are wrong use: tests/unit/cli/test_run.py."""
    assert launch.run("--event-log-handler", "console", launch.script("")) == 0
    assert json.loads(launch.err.splitlines()[-1])["event"] == "job_ended"


def test_numa_binding(launch: Launch) -> None:
    script = launch.script("import os; print(len(os.sched_getaffinity(0)))")
    workers = len(os.sched_getaffinity(0))
    flags = ["--nproc-per-node", str(workers), "--numa-binding", "exclusive"]
    status = launch.run(*flags, script)
    if status == 2:  # two threads of one core count as one
        assert "cores for" in launch.err
        return
    assert status == 0
    assert sum(map(int, launch.out.split())) == workers


def test_sessions(launch: Launch) -> None:
    """One for all workers or one for each: that is chosen by test_sessions.py's rules."""
    script = launch.script(
        "import os, sys\nsys.stdout.write(f'{os.getsid(0)} {os.getpgid(0) == os.getpid()}\\n')\n"
    )
    environ = {"RALLYPOINT_SESSIONS": "one"}
    assert launch.run("--nproc-per-node", "2", script, environ=environ) == 0
    one, other = launch.out.splitlines()
    assert one == other == f"{one.split()[0]} True"
    assert int(one.split()[0]) != os.getsid(0)


def test_completion(launch: Launch) -> None:
    assert launch.run("--print-completion", "bash") == 0
    assert launch.out.endswith("complete -o default -F _rallypoint rallypoint rallyrun\n")


def test_threads(launch: Launch) -> None:
    script = launch.script("import os; assert os.environ['OMP_NUM_THREADS'] == '1'")
    workers = len(os.sched_getaffinity(0))
    flags = ["--nproc-per-node", str(max(2, workers))]
    assert launch.run(*flags, script, environ={"OMP_NUM_THREADS": ""}) == 0
    assert launch.err == ""


def test_callers_error_file(launch: Launch) -> None:
    path = launch.directory / "reply.json"
    script = launch.script("import os; os.kill(os.getpid(), 9)")
    assert launch.run(script, environ={"TORCHELASTIC_ERROR_FILE": str(path)}) == 1
    assert json.loads(path.read_text())["message"]["errorCode"] == -9


OUR_VARIABLES = {
    *("RALLYPOINT_CONTROL_FD", "RALLYPOINT_FLIGHT_RECORD", "RALLYPOINT_LAUNCHERS_STDERR")
}


@pytest.mark.everyday
def test_environment(launch: Launch) -> None:
    flags = ["--no-python", sys.executable, "-c", "import os; print(*os.environ)"]
    assert launch.run(*flags) == 0
    assert not OUR_VARIABLES & set(launch.out.split())
    assert launch.run("--no-python", "env") == 0
    assert set(launch.out.split()) >= {"RALLYPOINT_CONTROL_FD=3", "RALLYPOINT_FLIGHT_RECORD=4:0"}


def test_agent_variables(launch: Launch) -> None:
    launch.script(DUMP, "dump.py")
    environ = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_HEALTH_CHECK_PORT": "1"}
    environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    assert launch.run("dump.py", environ=environ) == 0
    told = seen(launch)["environ"]
    assert "TORCHELASTIC_TIMER_FILE" not in told  # type: ignore[operator]
    assert told["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # type: ignore[index]


def test_hangs(launch: Launch) -> None:
    script = launch.script(
        "import time, numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(600)\n"
        "dist.barrier()\n"
    )
    flags = ("--hang-after", "2", "--on-hang", "stop", "--nproc-per-node", "2")
    assert launch.run(*flags, script) == 1
    assert "stopped, because the job hung: rank 1 never entered barrier #0" in launch.err


def test_last_line(launch: Launch) -> None:
    script = launch.script("import sys; sys.stdout.write('no end')")
    assert launch.run("--tee", "1", "--log-dir", "l", script) == 0
    assert launch.out == "[default0]:no end\n"
    (log,) = launch.directory.glob("l/latest/attempt_0/0/stdout.log")
    assert log.read_text() == "no end"


def test_latest(launch: Launch) -> None:
    for _ in range(2):
        assert launch.run("--log-dir", "l", "--rdzv-id", "try", launch.script("1")) == 0
    latest = (launch.directory / "l/latest").resolve()
    assert launch.err.startswith(f"rallypoint: logs: {latest}\n")


@pytest.mark.everyday
def test_error_files(launch: Launch) -> None:
    assert launch.run("--log-dir", "l", launch.script("1 / 0")) == 1
    (path,) = launch.directory.glob("l/latest/attempt_0/0/error.json")
    assert json.loads(path.read_text())["message"]["message"].startswith("ZeroDivisionError")
