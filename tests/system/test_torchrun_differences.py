"""Each difference of docs/torchrun-differences.md: our side always, torchrun's if it is there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.conftest import OURS, Launch
from tests.system.test_torchrun_conformance import DUMP, TORCHRUN

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[2] / "docs/torchrun-differences.md"
needs_torch = pytest.mark.needs_torch


def names() -> set[str]:
    """The page's names in brackets, as names of functions."""
    text = PAGE.read_text().replace("\n", " ")
    return {re.sub("[ -]", "_", name) for name in re.findall(r"\[([a-z -]+)\]", text)}


def test_every_difference_has_its_test() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    assert names() <= tested


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


def test_abbreviations(launch: Launch) -> None:
    launch.script(DUMP, "dump.py")
    assert launch.run("--max-rest", "1", "dump.py") == 2
    assert "unknown flag --max-rest; did you mean --max-restarts?" in launch.err


def test_dollars(launch: Launch) -> None:
    launch.script(DUMP, "dump.py")
    words = ["$local_rank", "$$", "$${local_rank}", "${local_rank}"]
    assert launch.run("dump.py", *words) == 0
    assert seen(launch)["argv"][1:] == ["$local_rank", "$$", "${local_rank}", "0"]  # type: ignore[index]


def test_missing_script(launch: Launch) -> None:
    assert launch.run("missing.py") == 2
    assert launch.err == "rallypoint run: script 'missing.py' does not exist; check its path.\n"


def test_unknown_signal(launch: Launch) -> None:
    assert launch.run("--signals-to-handle", "SIGNONE", launch.script("")) == 2
    assert "'SIGNONE' is not a signal that a program can handle" in launch.err


@pytest.mark.parametrize("flags", [["--nproc-per-node", "2"], ["--max-restarts", "1"], []])
def test_standard_input(flags: list[str], launch: Launch) -> None:
    result = subprocess.run(
        [sys.executable, *OURS, *flags, "-", "word"],
        input="import os, sys; print(sys.argv, os.environ['RANK'])",
        capture_output=True,
        text=True,
        check=False,
        cwd=launch.directory,
    )
    if flags:
        assert (result.returncode, result.stdout) == (2, "")
        assert "'-' is standard input" in result.stderr
    else:
        assert (result.returncode, result.stdout) == (0, "['-', 'word'] 0\n")


def test_empty_variables(launch: Launch) -> None:
    launch.script(DUMP, "dump.py")
    assert launch.run("dump.py", environ={"PET_ROLE": "", "PET_NNODES": ""}) == 0
    assert seen(launch)["environ"]["ROLE_NAME"] == "default"  # type: ignore[index]


def test_run_path(launch: Launch) -> None:
    assert launch.run("--run-path", "-m", launch.script("")) == 2
    assert "--run-path and --module cannot be combined" in launch.err


def test_standalone(launch: Launch) -> None:
    assert launch.run("--standalone", "--nnodes", "2", launch.script("")) == 2
    assert "--standalone means one machine" in launch.err


def test_meaningless_flags(launch: Launch) -> None:
    flags = ["--monitor-interval", "5", "--start-method", "fork"]
    assert launch.run(*flags, launch.script("")) == 0
    assert launch.err == ""
    assert launch.run(*flags, "--verbose", launch.script("")) == 0
    assert "--monitor-interval has no effect" in launch.err
    assert "--start-method fork has no effect" in launch.err


def test_plug_ins(launch: Launch) -> None:
    assert launch.run("--logs-specs", "mine", launch.script("")) == 2
    assert launch.run("--event-log-handler", "mine", launch.script("")) == 2
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


def test_master_address(launch: Launch) -> None:
    launch.script(DUMP, "dump.py")
    assert launch.run("dump.py") == 0
    assert seen(launch)["environ"]["MASTER_ADDR"] == "127.0.0.1"  # type: ignore[index]


STORE = """
import os, sys
from rallypoint.store.client import TCPStore
address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
store = TCPStore(address, port, is_master=False)
count = store.add("visits", 1)
sys.stdout.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {port} {count}\\n")
sys.stdout.flush()
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""


def test_empty_store(launch: Launch) -> None:
    assert launch.run("--max-restarts", "1", launch.script(STORE)) == 0
    first, second = (line.split() for line in launch.out.splitlines())
    assert (first[0], first[2], second[0], second[2]) == ("0", "1", "1", "1")
    assert first[1] != second[1]


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
    assert launch.out.endswith("complete -o default -F _rallyrun rallyrun\n")


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


OUR_VARIABLES = {"RALLYPOINT_CONTROL_FD", "RALLYPOINT_FLIGHT_RECORD"}


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


def test_undecorated(launch: Launch) -> None:
    assert launch.run(launch.script("{}['key']")) == 1
    assert "rallypoint: job failed: rank 0 raised KeyError: 'key'" in launch.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals(number: signal.Signals, launch: Launch) -> None:
    script = launch.script("import pathlib, time; pathlib.Path('up').touch(); time.sleep(600)")
    process = launch.start(script)
    launch.wait_for("up")
    process.send_signal(number)
    assert process.wait(30) == 128 + number


def test_user_signals(launch: Launch) -> None:
    script = launch.script(
        "import pathlib, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path('got').touch())\n"
        "pathlib.Path('up').touch()\n"
        "while not pathlib.Path('got').exists(): time.sleep(0.01)\n"
    )
    process = launch.start(script)
    launch.wait_for("up")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 0


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


def test_start_up_failures(launch: Launch) -> None:
    script = launch.script("print('start', flush=True)\nimport no_such_module\n")
    assert launch.run("--max-restarts", "3", script) == 1
    assert launch.out == "start\n"


def test_no_leftovers(launch: Launch) -> None:
    assert launch.run(launch.script("pass"), launcher=OURS) == 0
    assert launch.left_files() == []


def test_told(launch: Launch) -> None:
    assert launch.run("-r", "3", launch.script("import sys; sys.exit(1)")) == 1
    first, *_, last = launch.err.splitlines()
    assert first.startswith(f"rallypoint: logs: {launch.directory}/")
    assert last.endswith("/attempt_0/0/stderr.log")


def test_last_line(launch: Launch) -> None:
    script = launch.script("import sys; sys.stdout.write('no end')")
    assert launch.run("--tee", "1", "--log-dir", "l", script) == 0
    assert launch.out == "[default0]:no end\n"
    (log,) = launch.directory.glob("l/*/attempt_0/0/stdout.log")
    assert log.read_text() == "no end"


def test_error_files(launch: Launch) -> None:
    assert launch.run("--log-dir", "l", launch.script("1 / 0")) == 1
    (path,) = launch.directory.glob("l/*/attempt_0/0/error.json")
    assert json.loads(path.read_text())["message"]["message"].startswith("ZeroDivisionError")
