"""`rallypoint.launch` as tools call torch.distributed.run and .launcher: in their own process."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

SAY = "import os, sys; os.write(1, f\"{os.environ['RANK']} {sys.argv[1:]}\\n\".encode())"
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    raise KeyError("lost")
time.sleep(600)
"""


def run(launch: Launch, body: str, environ: dict[str, str] | None = None) -> int:
    script = launch.script(textwrap.dedent(body), "program.py")
    return launch.start(launcher=(script,), environ=environ).wait(200)


@pytest.mark.everyday
def test_main_and_run_launch_as_the_command_does(launch: Launch) -> None:
    script = launch.script(SAY)
    status = run(
        launch,
        f"""
        from rallypoint.launch import main, parse_args, run
        main(["--nproc_per_node=2", "--nnodes=1", "--node_rank=0", "--master_addr=127.0.0.1",
              {script!r}, "--role", "x"])
        run(parse_args(["--standalone", {script!r}, "-m"]))
        """,
    )
    assert status == 0, launch.err
    assert sorted(launch.out.splitlines()) == ["0 ['--role', 'x']", "0 ['-m']", "1 ['--role', 'x']"]


@pytest.mark.everyday
def test_a_failure_is_raised_with_torchs_attributes(launch: Launch) -> None:
    script = launch.script(FAIL)
    status = run(
        launch,
        f"""
        from rallypoint import WorkersFailedError
        from rallypoint.launch import ChildFailedError, main
        try:
            main(["--nproc-per-node", "2", {script!r}])
        except ChildFailedError as error:
            assert isinstance(error, WorkersFailedError)
            rank, first = error.get_first_failure()
            print(error.name == {script!r}, sorted(error.failures), rank, first.local_rank)
            print(first.exitcode, first.error_file, first.signal_name(), first.pid > 0)
            print(first.message["message"], first.message["errorCode"])
            print(error.format_msg() == str(error), "in <module>" in first.traceback)
        """,
    )
    assert status == 0, launch.err
    assert launch.out.splitlines() == [
        "True [1] 1 1",
        "1 <N/A> <N/A> True",
        "KeyError: 'lost' 1",
        "True True",
    ]


def test_words_that_are_no_command_line_end_the_program(launch: Launch) -> None:
    body = "from rallypoint.launch import main; main(['--no-such-flag', 'x.py'])"
    assert run(launch, body) == 2
    assert run(launch, "from rallypoint.launch import main; main(['missing.py'])") == 1
    assert "script 'missing.py' does not exist" in launch.err.splitlines()[-1]


@pytest.mark.everyday
def test_elastic_launch_takes_what_config_from_args_gives(launch: Launch) -> None:
    script = launch.script(SAY)
    status = run(
        launch,
        f"""
        from rallypoint.launch import config_from_args, elastic_launch, parse_args
        words = ["--nproc-per-node", "2", "--tee", "1", "--log-line-prefix-template",
                 "${{role_name}}:${{rank}}> ", "--role", "r", "--log-dir", "logs", {script!r}, "x"]
        config, program, arguments = config_from_args(parse_args(words))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 2)
        print(elastic_launch(config, program)(*arguments))
        """,
    )
    assert status == 0, launch.err
    shown = ["r:0> 0 ['x']", "r:1> 1 ['x']", "{0: None, 1: None}"]
    assert sorted(launch.out.splitlines()) == shown
    assert len(list(launch.directory.glob("logs/latest/attempt_0/?/stdout.log"))) == 2


def test_any_thread_may_launch_and_leaks_nothing(launch: Launch) -> None:
    status = run(
        launch,
        """
        import os, signal, threading
        from rallypoint.launch import LaunchConfig, elastic_launch
        def work():
            return os.environ["RANK"]
        def launch():
            values.append(elastic_launch(LaunchConfig(1, 1, 2), work)())
        if __name__ == "__main__":
            values, before = [], signal.getsignal(signal.SIGTERM)
            launch()
            opened = len(os.listdir("/proc/self/fd"))
            thread = threading.Thread(target=launch)
            thread.start()
            thread.join()
            assert len(os.listdir("/proc/self/fd")) == opened, os.listdir("/proc/self/fd")
            assert signal.getsignal(signal.SIGTERM) == before
            print(values)
        """,
    )
    values = {0: "0", 1: "1"}
    assert (status, launch.out) == (0, f"{[values, values]}\n"), launch.err
    assert launch.err.count("signals are not forwarded to the workers") == 1


def test_an_agent_of_a_programs_own(launch: Launch, free_port: int) -> None:
    """Two nodes, each made of a handler, a spec and an agent, as torchelastic's users do."""
    status = run(
        launch,
        f"""
        import os, subprocess, sys
        from rallypoint.launch import DefaultLogsSpecs, LocalElasticAgent, WorkerSpec
        from rallypoint.rendezvous import RendezvousParameters, get_rendezvous_handler
        def work(word):
            if word == "fail":
                raise KeyError("lost")
            return word + os.environ["RANK"] + os.environ["WORLD_SIZE"]
        def run(word, port):
            parameters = RendezvousParameters("c10d", f"127.0.0.1:{{port}}", "job", 2, 2)
            spec = WorkerSpec(role="r", local_world_size=1, entrypoint=work, args=(word,),
                              rdzv_handler=get_rendezvous_handler(parameters), max_restarts=0)
            return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs()).run()
        if __name__ == "__main__":
            is_first = len(sys.argv) == 1
            if is_first:
                other = subprocess.Popen([sys.executable, __file__, "other"])
            result = run("ok", {free_port})
            assert not result.is_failed()
            os.write(1, (str(result.return_values) + chr(10)).encode())
            if is_first:
                assert other.wait() == 0
        """,
    )
    assert status == 0, launch.err
    assert sorted(launch.out.splitlines()) == ["{0: 'ok02'}", "{1: 'ok12'}"]


def test_the_parser_is_torchs(launch: Launch) -> None:
    """What callers read from its result: each attribute, with torch's default and type."""
    torchs = pytest.importorskip("torch.distributed.run")
    from rallypoint.launch import get_args_parser

    words = ["--nproc-per-node", "2", "--max_restarts=3", "--duplicate-stdout-filters", "a,b,,c"]
    words += ["-r", "3", "--shutdown-timeout", "7", "-m", "mod", "--x", "-m"]
    for line in (["script.py"], words):
        theirs = vars(torchs.get_args_parser().parse_args(line))
        ours = vars(get_args_parser().parse_args(line))
        theirs.pop("print_completion", None)
        assert {name: ours.get(name, "absent") for name in theirs} == theirs


ERROR = """
import os, sys, time
from rallypoint import record
@record
def main():
    if os.environ["RANK"] == "1":
        {how}
    time.sleep(60)
main()
"""


@pytest.mark.parametrize(
    ("how", "message", "code"),
    [
        ("raise KeyError('lost')", "KeyError: 'lost'", 1),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", -9),
    ],
)
def test_whoever_started_the_launcher_gets_the_root_cause(
    how: str, message: str, code: int, launch: Launch
) -> None:
    path = launch.directory / "reply.json"
    script = launch.script(ERROR.replace("{how}", how))
    status = launch.run(
        "--nproc-per-node", "2", script, environ={"TORCHELASTIC_ERROR_FILE": str(path)}
    )
    assert status == 1
    told = json.loads(path.read_text())["message"]
    assert (told["message"], told["errorCode"]) == (message, code)
    assert ("in main" in told["extraInfo"]["py_callstack"]) is how.startswith("raise")
    if how.startswith("raise"):
        assert_torchrun_writes_the_same(launch, script, told)


def assert_torchrun_writes_the_same(launch: Launch, script: str, ours: dict[str, object]) -> None:
    pytest.importorskip("torch")
    path = launch.directory / "torchs.json"
    launch.run(
        *("--nproc-per-node", "2", script),
        environ={"TORCHELASTIC_ERROR_FILE": str(path)},
        launcher=("-m", "torch.distributed.run"),
    )
    told = json.loads(path.read_text())["message"]
    assert told.keys() == ours.keys()
    assert told["extraInfo"].keys() == ours["extraInfo"].keys()  # type: ignore[attr-defined]
    assert (told["message"], told["errorCode"]) == (ours["message"], ours["errorCode"])


def test_record_around_a_launch_keeps_the_workers_error(launch: Launch) -> None:
    path = launch.directory / "reply.json"
    script = launch.script(FAIL)
    body = f"""
        import rallypoint
        from rallypoint.launch import main
        @rallypoint.record
        def start():
            main(["--nproc-per-node", "2", {script!r}])
        start()
    """
    assert run(launch, body, {"TORCHELASTIC_ERROR_FILE": str(path)}) == 1
    assert json.loads(path.read_text())["message"]["message"] == "KeyError: 'lost'"


def test_a_link_named_torchrun_is_a_launcher(launch: Launch) -> None:
    program = Path(sys.executable).parent / "rallyrun"
    if not program.exists():
        pytest.skip("the package is not installed with its programs")
    link = launch.directory / "torchrun"
    link.symlink_to(program)
    start = f"import os, sys; os.execv({str(link)!r}, ['torchrun', *sys.argv[1:]])"
    script = launch.script(SAY)
    assert launch.run("--nproc-per-node", "2", script, "x", launcher=("-c", start)) == 0, launch.err
    assert sorted(launch.out.splitlines()) == ["0 ['x']", "1 ['x']"]


def test_a_missing_run_is_suggested(launch: Launch) -> None:
    assert launch.run("train.py", "--x", launcher=("-m", "rallypoint")) == 2
    assert launch.err == (
        "rallypoint: unknown command train.py; did you mean: rallypoint run train.py --x?\n"
    )
    flags = ("--nproc-per-node", "2", "train.py", "--x")
    assert launch.run(*flags, launcher=("-m", "rallypoint")) == 2
    assert "did you mean: rallypoint run --nproc-per-node 2 train.py ...?" in launch.err


def test_shells_complete_the_flags(launch: Launch) -> None:
    for shell in ("zsh", "tcsh", "bash"):
        assert launch.run("--print-completion", shell) == 0
        assert "nproc-per-node" in launch.out
    words = 'COMP_WORDS=(rallyrun --numa-binding "e"); COMP_CWORD=2; _rallypoint; '
    words += 'echo "${COMPREPLY[@]}"; COMP_WORDS=(rallyrun --nproc); COMP_CWORD=1; _rallypoint; '
    script = launch.out + words + 'echo "${COMPREPLY[@]}"\n'
    start = f"import os; os.execvp('bash', ['bash', '-c', {script!r}])"
    assert launch.run(launcher=("-c", start)) == 0
    assert launch.out == "exclusive\n--nproc-per-node\n"
    assert launch.run("--print-completion", "fish") == 2
    assert "it must be bash, zsh or tcsh" in launch.err


def test_what_sets_omp_num_threads_is_told_where_cores_stay_idle(launch: Launch) -> None:
    cpus = len(os.sched_getaffinity(0))
    script = launch.script("")
    assert launch.run("--nproc-per-node", "2", script, environ={"OMP_NUM_THREADS": ""}) == 0
    told = f"set it yourself, to {cpus // 2} for {cpus} CPUs and 2 workers"
    assert (told in launch.err) == (cpus >= 4)
