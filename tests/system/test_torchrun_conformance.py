"""The command line does what torchrun's does (2.13 to 2.15): the same cases under both.

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
from tests.system.conftest import MARK, OURS, Launch

from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import parse
from rallypoint.cli.run import run

pytestmark = pytest.mark.system

TORCHRUN = ("-m", "torch.distributed.run")
LEGACY = {OURS: ("-m", "rallypoint.launch"), TORCHRUN: ("-m", "torch.distributed.launch")}
LAUNCHERS = [
    pytest.param(OURS, id="rallypoint"),
    pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.needs_torch),
]
# Ours every day.
OFTEN = [pytest.param(OURS, id="rallypoint", marks=pytest.mark.everyday), LAUNCHERS[1]]

DUMP = """
import json, os, sys
seen = {"argv": sys.argv, "name": __name__, "environ": dict(os.environ),
        "unbuffered": sys.stdout.write_through, "executable": sys.executable}
with open(f"seen.{os.getpid()}", "w") as file:
    json.dump(seen, file)
"""


# All that a worker is told: no variable less than by torchrun, and none more.
CONTRACT = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
}


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
    executable: str = sys.executable
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
    "underscores, static, virtual local rank, interpreter": Case(
        flags=[
            *("--nproc_per_node=2", "--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1"),
            *("--master_port={port}", "--rdzv_conf=timeout=60", "--max_restarts=1"),
            *("--virtual_local_rank", "--local_addr=127.0.0.1"),
        ],
        variables={
            **{"OMP_NUM_THREADS": "3", "MASTER_PORT": "1", "RANK": "7"},
            **{"CUDA_VISIBLE_DEVICES": "5,7", "PYTHON_EXEC": "{directory}/other-python"},
        },
        executable="{directory}/other-python",
        environ={
            **{"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"},
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
    "flags heartbeat PET variables; a new name for each standalone job": Case(
        flags=["--standalone", "--nproc-per-node", "2", "--rdzv-id", "mine"],
        variables={"PET_NPROC_PER_NODE": "3"},
        environ={"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "????????-????-????-????-????????????"},
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


EVERYDAY = ("defaults", "dashes, role, signals, macro", "PET variables")
RUNS = [
    *(pytest.param(name, OURS, id=name, marks=pytest.mark.everyday) for name in EVERYDAY),
    *(pytest.param(name, OURS, id=name) for name in CASES if name not in EVERYDAY),
    *(
        pytest.param(name, TORCHRUN, id=f"{name}, torchrun", marks=pytest.mark.needs_torch)
        for name in CASES
    ),
]


@pytest.mark.parametrize(("name", "launcher"), RUNS)
def test_workers_see(name: str, launcher: tuple[str, ...], launch: Launch, free_port: int) -> None:
    case = CASES[name]
    launch.script(DUMP, "dump.py")
    (launch.directory / "other-python").symlink_to(sys.executable)
    places = {"port": str(free_port), "directory": str(launch.directory)}
    words = [fill(word, places) for word in (*case.flags, case.script)]
    status = launch.run(
        *words,
        *case.arguments,
        environ={
            "OMP_NUM_THREADS": "",
            **{variable: fill(text, places) for variable, text in case.variables.items()},
            "PYTHONPATH": str(launch.directory),
        },
        launcher=LEGACY[launcher] if case.is_legacy else launcher,
    )
    assert status == 0, launch.err
    workers = [json.loads(path.read_text()) for path in launch.directory.glob("seen.*")]
    assert sorted(worker["environ"]["RANK"] for worker in workers) == list("01"[: case.workers])
    last = max(workers, key=lambda worker: worker["environ"]["RANK"])
    assert last["argv"][1:] == list(case.argv)
    assert Path(last["argv"][0]).name == "dump.py"
    assert last["name"] == "__main__"
    if "--run-path" not in case.flags:  # torchrun's own interpreter runs it
        assert last["executable"] == fill(case.executable, places)
        assert last["unbuffered"] is True
    inherited = {*os.environ, *case.variables, "PYTHONPATH", "TMPDIR", MARK}
    told = last["environ"].keys() - inherited - {"OMP_NUM_THREADS", "LC_CTYPE"}
    if case.executable != sys.executable:  # an interpreter without our package keeps it
        told -= {"RALLYPOINT_CONTROL_FD", "RALLYPOINT_FLIGHT_RECORD"}
        told -= {"RALLYPOINT_LAUNCHERS_STDERR"}
    if "--shutdown-timeout" in case.flags:  # ours can be asked how long there is left
        told -= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    assert told == CONTRACT - inherited
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


WRONG = [
    ["--nproc-per-node", "many", "dump.py"],
    ["--nproc-per-node", "0", "dump.py"],
    ["--nnodes", "2:1", "dump.py"],
    ["--no-python", "-m", "dump"],
    ["--redirects", "7", "dump.py"],
    ["--start-method", "thread", "dump.py"],
    ["--numa-binding", "near", "dump.py"],
    ["--max-restarts", "-1", "dump.py"],
    ["--max-restarts", "few", "dump.py"],
    ["--rdzv-conf", "timeout", "dump.py"],
    ["--rdzv-backend", "zeus", "dump.py"],
    ["--local-ranks-filter", "x", "dump.py"],
    ["--logs-specs", "mine", "dump.py"],
    ["--no-such-flag", "dump.py"],
    ["--role"],
    [],
]


@pytest.mark.everyday
def test_wrong_use_is_one_sentence(
    launch: Launch, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process."""
    launch.script(DUMP, "dump.py")
    monkeypatch.chdir(launch.directory)
    for words in WRONG:
        assert run(words) == 2, words
        assert capfd.readouterr().err.count("\n") == 1, words


IN_TURN = """
import json, os, sys
import torch.distributed.run as run
for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        try:
            run.main(words)
        except SystemExit as end:
            os._exit(end.code)
        except BaseException:
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.mark.exact
@pytest.mark.needs_torch
def test_torchrun_takes_the_same_for_wrong_use(launch: Launch) -> None:
    """In one process that imports torch once: a start of torchrun's takes seconds."""
    launch.script(DUMP, "dump.py")
    status = launch.run(json.dumps(WRONG), launcher=("-c", IN_TURN))
    assert status == 0, launch.err
    statuses = launch.out.split()
    assert len(statuses) == len(WRONG)
    assert "0" not in statuses, dict(zip(map(" ".join, WRONG), statuses, strict=True))
    assert not list(launch.directory.glob("seen.*"))


@pytest.mark.parametrize("launcher", OFTEN)
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
    assert process.wait(60) != 0  # the job was stopped, however well its worker ended
    # torchrun passes on the signal itself or SIGTERM, whichever its agent comes to first.
    assert list(launch.directory.glob("got.*"))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_counting_workers(launcher: tuple[str, ...], launch: Launch) -> None:
    """On a machine without accelerators (as CI's): torch's count and ours are one per CPU."""
    if list(Path("/dev").glob("nvidia*")) or Path("/sys/class/kfd").exists():
        pytest.skip("this machine has accelerators: torch's build decides whether it sees them")
    launch.script(DUMP, "dump.py")
    assert launch.run("--nproc-per-node", "auto", "dump.py", launcher=launcher) == 0, launch.err
    assert len(list(launch.directory.glob("seen.*"))) == len(os.sched_getaffinity(0))


# Every flag of torchrun 2.15 with a value for it; "": it takes none.
EVERY_FLAG = {
    **{"--nnodes": "1:2", "--nproc-per-node": "3", "--rdzv-backend": "c10d", "--rdzv-id": "a"},
    **{"--rdzv-endpoint": "a:1", "--rdzv-conf": "a=b", "--standalone": "", "--max-restarts": "2"},
    **{"--monitor-interval": "0.5", "--start-method": "fork", "--event-log-handler": "console"},
    **{"--role": "r", "--module": "", "--no-python": "", "--run-path": "", "--log-dir": "d"},
    **{"--redirects": "1", "--tee": "0:2", "--local-ranks-filter": "0,1", "--node-rank": "1"},
    **{"--duplicate-stdout-filters": "x", "--duplicate-stderr-filters": "y", "--master-addr": "h"},
    **{"--master-port": "29501", "--local-addr": "h", "--logs-specs": "mine"},
    **{"--numa-binding": "node", "--signals-to-handle": "SIGTERM", "--shutdown-timeout": "7"},
    **{"--virtual-local-rank": "", "--log-line-prefix-template": "${rank}: "},
    **{"--print-completion": "bash"},
}
NEWER = {"--log-line-prefix-template", "--print-completion"}  # than 2.13; both are in 2.14
# What it reads from arguments, then from variables, and all that it calls its flags.
PARSE = """
import json, os, sys
from torch.distributed.run import get_args_parser

def read(words):
    parser = get_args_parser()
    args = vars(parser.parse_args([*words, "x"]))
    values = {}
    for action in parser._actions:
        if action.option_strings:
            value = args.get(action.dest)
            name = max(action.option_strings, key=len).replace("_", "-")
            text = ",".join(value) if isinstance(value, list) else str(value)
            values[name] = [text, action.nargs == 0]
    return values

flags, newer, variables = json.loads(sys.argv[1])
spellings = [each for action in get_args_parser()._actions for each in action.option_strings]
is_new = "--print-completion" in spellings
# It prints a completion as soon as it reads that flag, so it is never given here.
left_out = ["--print-completion"] if is_new else newer
given = read([each for each in flags if each.partition("=")[0] not in left_out])
os.environ.update(variables)
print(json.dumps([is_new, given, read([]), spellings]))
"""


def pet(flag: str) -> str:
    return "PET_" + flag[2:].replace("-", "_").upper()


@pytest.mark.everyday
@pytest.mark.exact
@pytest.mark.needs_torch
def test_torchruns_own_parser_reads_the_same(launch: Launch) -> None:
    """Each flag and each variable, as torchrun's parser and ours read them."""
    variables = {pet(flag): text or "1" for flag, text in EVERY_FLAG.items()}
    flags = [f"{flag}={text}" if text else flag for flag, text in EVERY_FLAG.items()]
    given = json.dumps([flags, sorted(NEWER), variables])
    assert launch.run(given, launcher=("-c", PARSE)) == 0, launch.err
    is_new, by_flags, by_variables, spellings = json.loads(launch.out)
    left_out = {"--print-completion"} if is_new else NEWER
    flags = [each for each in flags if each.partition("=")[0] not in left_out]
    for words, environ, theirs in ((flags, {}, by_flags), ([], variables, by_variables)):
        ours, rest = parse([*words, "x"], RunOptions, program="", environ=environ)
        assert rest == ["x"]
        assert theirs.keys() - {"--help"} == EVERY_FLAG.keys() - (set() if is_new else NEWER)
        for flag, (value, is_switch) in theirs.items():
            if flag in ("--help", "--print-completion") or (
                environ and flag in ("--logs-specs", "--numa-binding")
            ):
                continue  # torchrun reads no variable for these two
            assert ours.texts[flag] == ("1" if is_switch else value), flag
    for spelling in set(spellings) - {"-h", "--help"}:
        value = EVERY_FLAG.get(spelling.replace("_", "-"), "1")
        is_switch = spelling in ("-m",) or value == ""
        parse([spelling if is_switch else f"{spelling}={value}"], RunOptions, program="")


@pytest.mark.everyday
def test_every_flag_is_launched_with_somewhere() -> None:
    """Here, or in the tests of logs, differences and several nodes."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("test_*.py")]
    for flag in EVERY_FLAG:
        spellings = (f'"{flag}', f'"{flag.replace("-", "_").replace("__", "--")}', f'"{pet(flag)}')
        before = "EVERY_FLAG = {"
        assert any(each in text.partition(before)[0] for each in spellings for text in texts), flag
