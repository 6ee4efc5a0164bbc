"""The command line does what torchrun 2.13's does: the same cases under both, where torch is there.

Each case is flags, variables and arguments. What its workers see (arguments, variables, streams)
and the exit status must be what the case says; under real torchrun it must be the same, which keeps
the expectations honest. What is different on purpose is docs/torchrun-differences.md's, and tested
in test_torchrun_differences.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.system.conftest import OURS, Launch

pytestmark = pytest.mark.system

TORCHRUN = ("-m", "torch.distributed.run")
LEGACY = {OURS: ("-m", "rallypoint.launch"), TORCHRUN: ("-m", "torch.distributed.launch")}
LAUNCHERS = [
    pytest.param(OURS, id="rallypoint"),
    pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.needs_torch),
]

DUMP = """
import json, os, sys
names = "RANK WORLD_SIZE LOCAL_ GROUP_ ROLE_ MASTER_ TORCHELASTIC OMP_ CUDA_".split()
environ = {name: text for name, text in os.environ.items() if name.startswith(tuple(names))}
seen = {"argv": sys.argv, "name": __name__, "environ": environ,
        "unbuffered": sys.stdout.write_through, "executable": sys.executable}
with open(f"seen.{os.getpid()}", "w") as file:
    json.dump(seen, file)
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """`flags SCRIPT arguments`, and what worker 1 of 2 (or 0 of 1) must see."""

    flags: Sequence[str]
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    argv: Sequence[str] = ()
    environ: Mapping[str, str | None] = field(default_factory=dict)  # None: not there
    workers: int = 2
    script: str = "dump.py"
    is_legacy: bool = False


CASES = {
    "defaults": Case(
        flags=[],
        workers=1,
        environ={
            **{"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
            **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"},
            **{"ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1", "OMP_NUM_THREADS": None},
            **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
    ),
    "dashes, role, signals, macro": Case(
        flags=[
            *("--nproc-per-node", "2", "--nnodes=1:1", "--role", "trainer", "--max-restarts", "2"),
            *("--signals-to-handle", "SIGTERM,SIGUSR1", "--monitor-interval", "0.5"),
            *("--start-method=spawn", "--shutdown-timeout", "5", "--event-log-handler", "null"),
        ],
        arguments=["${local_rank}", "x=${local_rank}", "--log-dir", "-r3", "--", "", "a b"],
        argv=["1", "x=1", "--log-dir", "-r3", "--", "", "a b"],
        environ={
            **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "ROLE_NAME": "trainer"},
            **{"ROLE_RANK": "1", "ROLE_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            **{"TORCHELASTIC_MAX_RESTARTS": "2", "MASTER_PORT": "*"},
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGUSR1",
        },
    ),
    "underscores, static": Case(
        flags=[
            *("--nproc_per_node=2", "--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1"),
            *("--master_port={port}", "--rdzv_conf=timeout=60", "--max_restarts=1"),
        ],
        variables={"OMP_NUM_THREADS": "3", "MASTER_PORT": "1", "RANK": "7"},
        environ={
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}", "OMP_NUM_THREADS": "3"},
            **{"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "TORCHELASTIC_MAX_RESTARTS": "1"},
        },
    ),
    "PET variables": Case(
        flags=[],
        variables={
            **{"PET_NPROC_PER_NODE": "2", "PET_NNODES": "1", "PET_ROLE": "r", "PET_MODULE": "1"},
            **{"PET_RDZV_ID": "job7", "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "4"},
            **{"PET_RDZV_ENDPOINT": "localhost:0", "PET_STANDALONE": "0"},
        },
        script="dump",
        arguments=["--nproc-per-node", "9"],
        argv=["--nproc-per-node", "9"],
        environ={
            **{"WORLD_SIZE": "2", "ROLE_NAME": "r", "TORCHELASTIC_RUN_ID": "job7"},
            **{"TORCHELASTIC_MAX_RESTARTS": "4"},
        },
    ),
    "flags beat PET variables; a new name for each standalone job": Case(
        flags=["--standalone", "--nproc-per-node", "2", "--rdzv-id", "mine"],
        variables={"PET_NPROC_PER_NODE": "3"},
        environ={"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "????????-????-????-????-????????????"},
    ),
    "virtual local rank": Case(
        flags=["--nproc-per-node", "2", "--virtual-local-rank"],
        variables={"CUDA_VISIBLE_DEVICES": "5,7"},
        environ={"LOCAL_RANK": "0", "RANK": "1", "CUDA_VISIBLE_DEVICES": "7"},
    ),
    "run path": Case(
        flags=["--run-path", "--no-python"],
        workers=1,
        script="{directory}/dump.py",
        arguments=["x", "--y"],
        argv=["x", "--y"],
    ),
    "legacy": Case(
        flags=["--nproc-per-node=2"],
        is_legacy=True,
        arguments=["--epochs", "3"],
        argv=["--local-rank=1", "--epochs", "3"],
        environ={"LOCAL_RANK": "1"},
    ),
    "legacy with the environment": Case(
        flags=["--nproc_per_node", "2", "--use_env"],
        is_legacy=True,
        arguments=["--epochs", "3"],
        argv=["--epochs", "3"],
        environ={"LOCAL_RANK": "1"},
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", CASES)
def test_workers_see(name: str, launcher: tuple[str, ...], launch: Launch, free_port: int) -> None:
    case = CASES[name]
    launch.script(DUMP, "dump.py")
    places = {"port": str(free_port), "directory": str(launch.directory)}
    words = [fill(word, places) for word in (*case.flags, case.script)]
    status = launch.run(
        *words,
        *case.arguments,
        environ={**dict(case.variables), "PYTHONPATH": str(launch.directory)},
        launcher=LEGACY[launcher] if case.is_legacy else launcher,
    )
    assert status == 0, launch.err
    workers = [json.loads(path.read_text()) for path in launch.directory.glob("seen.*")]
    assert sorted(worker["environ"]["RANK"] for worker in workers) == list("01"[: case.workers])
    last = max(workers, key=lambda worker: worker["environ"]["RANK"])
    assert last["argv"][1:] == list(case.argv)
    assert Path(last["argv"][0]).name == "dump.py"
    assert last["name"] == "__main__"
    for variable, text in case.environ.items():
        assert matches(last["environ"].get(variable), text, places), (variable, last["environ"])


def fill(word: str, places: Mapping[str, str]) -> str:
    """Only names in braces that are places: ``${local_rank}`` stays."""
    return re.sub(r"{(port|directory)}", lambda found: places[found[1]], word)


def matches(found: str | None, expected: str | None, places: Mapping[str, str]) -> bool:
    if found is None or expected is None:
        return found is expected
    pattern = re.escape(fill(expected, places)).replace(r"\*", ".+").replace(r"\?", ".")
    return re.fullmatch(pattern, found) is not None


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(
    ("flags", "script"),
    [
        (["--nproc-per-node", "many"], "dump.py"),
        (["--nnodes", "2:1"], "dump.py"),
        (["--no-python", "-m"], "dump"),
        (["--redirects", "7"], "dump.py"),
        (["--start-method", "thread"], "dump.py"),
        (["--no-such-flag"], "dump.py"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_starts_nothing(
    flags: list[str], script: str, launcher: tuple[str, ...], launch: Launch
) -> None:
    launch.script(DUMP, "dump.py")
    status = launch.run(*flags, script, launcher=launcher)
    assert status != 0
    assert not list(launch.directory.glob("seen.*"))
    if launcher == OURS:
        assert status == 2
        assert launch.err.count("\n") == 1  # one sentence; torchrun shows a traceback


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failed_job_exits_with_1_after_its_restarts(
    launcher: tuple[str, ...], launch: Launch
) -> None:
    script = launch.script(
        "import os, pathlib, sys\n"
        "count = os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "pathlib.Path(f'ran.{count}.{os.environ[\"RANK\"]}').touch()\n"
        "sys.exit(3 if os.environ['RANK'] == '1' else 0)\n"
    )
    flags = ("--nproc-per-node", "2", "--max-restarts", "1", "--monitor-interval", "0.1")
    assert launch.run(*flags, script, launcher=launcher) == 1
    ran = sorted(path.name for path in launch.directory.glob("ran.*.1"))
    assert ran == ["ran.0.1", "ran.1.1"]
    assert "exitcode  : 3" in launch.err or "exited with code 3" in launch.err


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_listed_signals_are_passed_on(launcher: tuple[str, ...], launch: Launch) -> None:
    script = launch.script(
        "import pathlib, signal, sys, time\n"
        "def note(number, frame):\n"
        "    pathlib.Path(f'got.{number}').touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGUSR1, note); signal.signal(signal.SIGTERM, note)\n"
        "pathlib.Path('up').touch(); time.sleep(600)\n"
    )
    process = launch.start("--signals-to-handle", "SIGUSR1", script, launcher=launcher)
    launch.wait_for("up")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(40) != 0  # the job was stopped, however well its worker ended
    # torchrun passes on the signal itself or SIGTERM, whichever its agent comes to first.
    assert list(launch.directory.glob("got.*"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_python_exec_chooses_the_interpreter(launcher: tuple[str, ...], launch: Launch) -> None:
    launch.script(DUMP, "dump.py")
    link = launch.directory / "other-python"
    link.symlink_to(sys.executable)
    environ = {"PYTHON_EXEC": str(link)}
    assert launch.run("dump.py", environ=environ, launcher=launcher) == 0, launch.err
    (seen,) = launch.directory.glob("seen.*")
    assert json.loads(seen.read_text())["executable"] == str(link)
    assert json.loads(seen.read_text())["unbuffered"] is True


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_counting_workers(kind: str, launcher: tuple[str, ...], launch: Launch) -> None:
    """On a machine without accelerators (as CI's): torch's count and ours are one per CPU."""
    if list(Path("/dev").glob("nvidia*")) or Path("/sys/class/kfd").exists():
        pytest.skip("this machine has accelerators: torch's build decides whether it sees them")
    launch.script(DUMP, "dump.py")
    assert launch.run("--nproc-per-node", kind, "dump.py", launcher=launcher) == 0, launch.err
    assert len(list(launch.directory.glob("seen.*"))) == len(os.sched_getaffinity(0))
