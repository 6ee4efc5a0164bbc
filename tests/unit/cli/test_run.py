"""The command line: what is the launcher's, what is the script's, and wrong use in one sentence."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint import cli
from rallypoint.cli import run as run_module
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import UsageError, parse
from rallypoint.cli.read_job import count_workers, read_job, worker_program
from rallypoint.cli.store import store

FLAGS = tuple(RunOptions.flags.values())


def split(*words: str, **environ: str) -> tuple[Mapping[str, str], list[str]]:
    options, rest = parse(words, RunOptions, program="rallypoint run", environ=environ)
    return options.texts, rest


@pytest.mark.parametrize(
    "words",
    [
        ["--nproc-per-node", "4", "--log-prefix", "{rank}: "],
        ["--nproc_per_node", "4", "--log_prefix", "{rank}: "],
        ["--nproc-per-node=4", "--log-prefix={rank}: "],
        ["--nproc_per_node=4", "--log_prefix={rank}: "],
        ["--nproc-per-node", "9", "--nproc-per-node", "4", "--log-prefix", "{rank}: "],
    ],
)
def test_all_spellings(words: list[str]) -> None:
    values = {"--nproc-per-node": "4", "--log-prefix": "{rank}: "}
    assert split(*words, "train.py") == (values, ["train.py"])


def test_values_keep_their_underscores() -> None:
    assert split("--log_prefix=a_b", "x")[0] == {"--log-prefix": "a_b"}


@given(st.lists(st.text() | st.sampled_from(["--r=16", "--log", "-m", "--", "--help", "--nproc"])))
def test_everything_after_the_script_is_the_scripts(arguments: list[str]) -> None:
    assert split("--standalone", "train.py", *arguments)[1] == ["train.py", *arguments]
    assert split("--", "--odd-name", *arguments)[1] == ["--odd-name", *arguments]


def test_the_environment_fills_in() -> None:
    values, _ = split("x", PET_NPROC_PER_NODE="3", PET_STANDALONE="1", PET_VERBOSE="0")
    assert values == {"--nproc-per-node": "3", "--standalone": "1"}
    assert split("--nproc-per-node=2", "x", PET_NPROC_PER_NODE="3")[0]["--nproc-per-node"] == "2"


def test_short_flags() -> None:
    for words in (["-r", "3", "-t", "0:1", "-m"], ["-r3", "-t0:1", "-m"], ["-r=3", "-t=0:1", "-m"]):
        values, rest = split(*words, "pkg", "-r", "1")
        assert values == {"--redirects": "3", "--tee": "0:1", "--module": "1"}, words
        assert rest == ["pkg", "-r", "1"]


def test_a_variable_for_a_flag_without_value_is_1_or_0() -> None:
    with pytest.raises(UsageError, match="PET_STANDALONE is 'yes'; it must be 1 or 0"):
        split("x", PET_STANDALONE="yes")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nproc-per-nod", "2", "x"], "unknown flag --nproc-per-nod; did you mean --nproc-per-n"),
        (["--log", "x"], "unknown flag --log"),
        (["--zzz=1", "x"], "unknown flag --zzz; see rallypoint run --help"),
        (["--nproc", "2", "x"], "unknown flag --nproc; did you mean --nproc-per-node?"),
        (["--nprocs=2", "x"], "unknown flag --nprocs; did you mean --nproc-per-node?"),
        (["--nod_rank", "2", "x"], "unknown flag --nod_rank; did you mean --node-rank?"),
        (["--mdule", "x"], "unknown flag --mdule; did you mean --module?"),
        (["-x", "y"], "unknown flag -x; see rallypoint run --help"),
        (["--backend=rallypoint", "x"], "unknown flag --backend; the script names its backend"),
        (["--nproc-per-node"], "--nproc-per-node needs a value: --nproc-per-node N"),
        (["--role", "--nproc_per_node=2", "x"], "--role needs a value: --role NAME"),
        (["--role", "-m", "x"], "--role needs a value: --role NAME"),
        (["--standalone=yes", "x"], "--standalone takes no value; leave out '=yes'"),
    ],
)
def test_wrong_flags(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        split(*words)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("-n", "--nproc-per-node"),
        ("-np", "--nproc-per-node"),
        ("--np", "--nproc-per-node"),
        ("--num_processes", "--nproc-per-node"),
        ("--num_gpus=8", "--nproc-per-node"),
        ("-N", "--nnodes"),
        ("--num_machines", "--nnodes"),
        ("-H", "--hosts"),
        ("--machinefile", "--hostfile"),
        ("--machine_rank", "--node-rank"),
        ("--main_process_ip", "--master-addr"),
        ("--nproc_per_nod", "--nproc-per-node"),
    ],
)
def test_what_other_launchers_call_it(word: str, meant: str) -> None:
    with pytest.raises(UsageError, match=rf"unknown flag \S+; did you mean {meant}\?"):
        split(word, "2", "train.py")


def test_no_flag_is_what_another_is_called_elsewhere() -> None:
    spelled = {name for flag in FLAGS for name in (flag.name, flag.short)}
    elsewhere = [name for flag in FLAGS for name in flag.elsewhere]
    assert len(set(elsewhere)) == len(elsewhere)
    assert not spelled & set(elsewhere)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("rallypoint/train.py --nnodes 2", "--nnodes is after rallypoint/train.py"),
        ("torch_train.py --nnodes 2", "--nnodes is after torch_train.py"),
        ("train.py --nproc-per-node 4", "--nproc-per-node is after train.py"),
        ("train.py -x --nnodes=2 --nnodes 3", "--nnodes is after train.py"),
        ("train.py --nnodes 2 --rdzv_id 3", "--nnodes, --rdzv_id are after train.py"),
        ("train.py --hosts a --epochs 3 nnodes", ""),  # scripts may have those
        ("-m torch.distributed.run --nnodes 2 x.py", ""),
    ],
)
def test_launcher_flags_behind_the_script_are_told(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rallypoint").mkdir()
    for script in ("train.py", "torch_train.py", "rallypoint/train.py"):
        Path(script).touch()
    options, command = parse(words.split(), RunOptions, program="rallypoint run")
    job, notes = read_job(options, command, {})
    assert job.command[2:] == (("-m",) if options.module else ()) + tuple(command)
    assert [note for note in notes if "passed to it" in note] == [
        each for each in notes if told and each.startswith(told)
    ]
    assert any("passed to it" in note for note in notes) is bool(told)


def test_numbers_of_workers() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert count_workers(RunOptions().nproc_per_node, {}) == 1
    assert count_workers("12", {}) == 12
    assert count_workers("auto", {}) == cpus
    assert count_workers("cpu", {}) == cpus


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "", "1_0", "\u0662"])
def test_impossible_numbers_of_workers(text: str) -> None:
    with pytest.raises(UsageError, match="it must be 1 or more, 'auto', 'cpu', 'gpu'"):
        count_workers(text, {})


def test_the_workers_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(tmp_path / "train.py")
    Path(script).touch()
    python = {"PYTHON_EXEC": "/py"}

    def program(*command: str, **flags: str) -> tuple[str, ...]:
        values = {f"--{name.replace('_', '-')}": text for name, text in flags.items()}
        return worker_program(RunOptions(values), command, python, is_run_once=True)

    assert program(script, "-x") == ("/py", "-u", script, "-x")
    assert program("pkg.train", "--x", module="1") == ("/py", "-u", "-m", "pkg.train", "--x")
    assert program("sh", "-c", "x", no_python="1") == ("sh", "-c", "x")
    assert program("-", "x") == ("/py", "-u", "-", "x")
    monkeypatch.chdir(tmp_path)
    Path("-c").touch()
    assert program("-c", "x") == ("/py", "-u", "./-c", "x")
    (tmp_path / "__main__.py").touch()
    assert program(str(tmp_path)) == ("/py", "-u", str(tmp_path))
    assert program(script, run_path="1", no_python="1")[:3] == ("/py", "-u", "-c")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no script given"),
        (["--standalone"], "no script given"),
        (["-m"], "no module given; name one, as in: rallypoint run -m my_package.train"),
        (["--no-python"], "no program given"),
        (["tests"], "'tests' is a directory without a __main__.py; name a script"),
        (["--nproc-per-node", "2", "-"], "'-' is standard input, which only one worker can read"),
        (["--max-restarts", "1", "-"], "'-' is standard input, which only one worker can read"),
        (["--run-path", "-m", "x"], "--run-path and --module cannot be combined"),
        (["--token-file", "missing", __file__], "the token file missing cannot be read"),
        (["missing.py"], "script 'missing.py' does not exist"),
        (["--no-python", "./missing"], "program './missing' does not exist"),
        (["-m", "--no-python", "x"], "--module and --no-python cannot be combined"),
        (["--nproc-per-node", "0", __file__], "--nproc-per-node is '0'"),
        (["--nproc-per-node", "5000", __file__], "cannot run 5000 workers on one machine"),
        (["--nproc-per-node", "xpu", __file__], "this machine has no such devices"),
        (["--nnodes", "1:2", __file__], "the number of static machines cannot change"),
        (["--nnodes", "2", "--node-rank", "2", __file__], "it must be from 0 to 1"),
        (["--standalone", "--nnodes", "2", __file__], "--standalone means one machine"),
        (["--max-restarts", "-1", __file__], "--max-restarts is '-1'; it must be an integer"),
        (["--shutdown-timeout", "soon", __file__], "it must be a number of seconds"),
        (["--shutdown-timeout", "nan", __file__], "it must be a number of seconds"),
        (["--hang-after", "0", __file__], "use --on-hang off"),
        (["--on-hang", "kill", __file__], "it must be off, report, restart or stop"),
        (["--log-prefix", "{rnk}", __file__], "--log-prefix is '{rnk}'; it may use"),
        (["--log-prefix", "{", __file__], "--log-prefix is '{'; it may use"),
        (["-r", "4", __file__], "--redirects: '4' does not name streams"),
        (["--tee", "0:1,x", __file__], "--tee: '0:1,x' does not name streams"),
        (["--local-ranks-filter", "0,x", __file__], "it must be local ranks, as in 0,1"),
        (["--logs-specs", "mine", __file__], "only 'default' is accepted"),
        (["--start-method", "thread", __file__], "it must be spawn, fork or forkserver"),
        (["--signals-to-handle", "SIGTERM,SIGKILL", __file__], "'SIGKILL' is not a signal"),
        (["--event-log-handler", "mine", __file__], "it must be null or console"),
        (["--numa-binding", "near", __file__], "it must be one of node, socket, exclusive"),
        (["--quiet", "--verbose", __file__], "--quiet and --verbose cannot be combined"),
        (["--rdzv-backend", "zeus", __file__], "it must be one of static, c10d, etcd"),
        (["--rdzv-conf", "timeout", __file__], "'timeout' is not KEY=VALUE"),
        (["--rdzv-endpoint", "a:b", __file__], "--rdzv-endpoint is 'a:b'; it must be HOST:PORT"),
        (["--nnodes", "0", __file__], "--nnodes is '0'; it must be a number of at least 1"),
        (["--nnodes", "3:2", __file__], "--nnodes is '3:2'"),
        (
            ["--nnodes=2", "--rdzv-backend=etcd-v2", "--rdzv-endpoint=a:1", __file__],
            "choose etcd, which uses version 3 at the same endpoint",
        ),
        (["--monitor-interval", "x", __file__], "--monitor-interval is 'x'"),
        (["--require-token", "--nnodes", "1:2", __file__], "this job of several machines has no t"),
        (["python3", "train.py", "-x"], "leave that word out, as in: rallypoint run train.py -x"),
        (["python"], "leave that word out, as in: rallypoint run train.py"),
        ([f"{__file__} -x"], f"leave out the quotation marks, as in: rallypoint run {__file__} -x"),
        (["/missing/train.py"], "script '/missing/train.py' does not exist; check its path."),
        ([__file__[:-1]], f"does not exist; did you mean {__file__}?"),
    ],
)
def test_wrong_use_gets_one_sentence_and_exit_2(
    words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_module.run(words) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("rallypoint run: ")
    assert sentence in err


def test_flags_of_torchrun_that_have_no_effect_are_told() -> None:
    values = {
        "--verbose": "1",
        "--start-method": "fork",
        "--monitor-interval": "5",
        "--duplicate-stdout-filters": "a",
    }
    _, notes = read_job(RunOptions(values), [__file__], {})
    assert notes == [
        "--duplicate-*-filters apply only to teed lines, and --tee names none",
        "--start-method fork has no effect: workers are always new interpreters",
        "--monitor-interval has no effect: workers are watched, not polled",
    ]


def test_as_gloo_needs_pytorchs_backends_to_be_loaded() -> None:
    job, _ = read_job(RunOptions({"--as-gloo": "1"}), [__file__], {})
    assert job.environ["RALLYPOINT_AS_GLOO"] == "1"
    with pytest.raises(UsageError, match="which TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns off; unset"):
        read_job(RunOptions({"--as-gloo": "1"}), [__file__], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


@pytest.mark.parametrize(
    ("words", "variables", "note"),
    [
        ([], {"PET_NPROC_PER_NODE": "x"}, " (The environment has PET_NPROC_PER_NODE=x.)"),
        (["--nproc-per-node=y"], {"PET_NPROC_PER_NODE": "x"}, ""),
        ([], {"PET_NNODES": "2", "PET_STANDALONE": "1"}, " (The environment has PET_NNODES=2, PET"),
        ([], {"PET_MAX_RESTARTS": "-1", "PET_ROLE": "r"}, " has PET_MAX_RESTARTS=-1.)"),
        (["--zzz"], {"PET_NPROC_PER_NODE": "x"}, ""),
    ],
)
def test_an_error_of_the_environments_says_so(
    words: list[str],
    variables: dict[str, str],
    note: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert run_module.run([*words, __file__]) == 2
    err = capfd.readouterr().err
    assert note in err
    assert bool(note) == ("The environment" in err)


def test_the_token_of_a_file_counts_and_reaches_no_log(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("open sesame\n")
    values = {"--token-file": str(tmp_path / "token")}
    job, notes = read_job(RunOptions(values), [__file__], {"RALLYPOINT_TOKEN": "other"})
    assert job.token == job.nodes.token == b"open sesame"
    assert "sesame" not in repr(job)
    assert notes == []


def test_no_variable_asks_for_help() -> None:
    assert split("x", PET_HELP="1", PET_HELP_ALL="1")[0] == {}


def test_the_short_help_has_no_seldom_used_flags(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_module.run(["--help"]) == 0
    shown = re.findall(r"^  (?:-\w, )?(--[\w-]+)", capfd.readouterr().out, re.MULTILINE)
    assert len(shown) <= 20
    assert set(shown) <= set(RunOptions.flags)
    assert run_module.run(["--help-all"]) == 0
    everything = capfd.readouterr().out
    assert all(f"  {name}" in everything or f", {name}" in everything for name in RunOptions.flags)


@pytest.mark.parametrize(
    ("words", "status", "stdout", "stderr"),
    [
        (["--help"], 0, "usage: rallypoint COMMAND", ""),
        ([], 2, "usage: rallypoint COMMAND", ""),
        (["help"], 0, "Prepare:\n  doctor      find what", ""),
        (["help", "ps"], 0, "usage: rallypoint ps", ""),
        (["help", "run", "train.py"], 0, "usage: rallypoint run", ""),
        (["help", "rum"], 2, "", "unknown command rum; did you mean run?"),
        (["--version"], 0, "rallypoint 0.", ""),
        (["run", "--help"], 0, "--nproc-per-node N", ""),
        (["run", "--help-all"], 0, "--signals-to-handle NAMES", ""),
        (["rum"], 2, "", "unknown command rum; did you mean run?"),
        (["--runn"], 2, "", "unknown flag --runn"),
        (["train.py"], 2, "", "did you mean: rallypoint run train.py?"),
        (["--np", "2", "a.py", "b"], 2, "", "did you mean: rallypoint run --np 2 a.py ...?"),
        (["--dry-run", "run", "a.py"], 2, "", "did you mean: rallypoint run --dry-run a.py?"),
        (["--json", "explain"], 2, "", "did you mean: rallypoint explain --json?"),
        (["version"], 2, "", "did you mean --version?"),
        (["hang"], 2, "", "did you mean explain?"),
        (["--help-all"], 2, "", "unknown flag --help-all; did you mean rallypoint run --help-all?"),
        (["ps", "mine"], 2, "", "rallypoint ps: 'mine' is not a flag; it takes no other"),
        (["doctor", "--dry-run"], 2, "", "unknown flag --dry-run"),
        (["where", "mine"], 2, "", "rallypoint where: 'mine' is not a flag; it takes no other"),
        (["store", "mine"], 2, "", "unexpected argument 'mine'; it takes only flags"),
        (["store", "--port", "70000"], 2, "", "--port 70000 is not a port; give one from 0 to"),
        (["trace", "--seconds", "x"], 2, "", "--seconds is 'x'; it must be a number up to"),
        (["trace"], 2, "", "name the file to write, as in -o trace.json.gz"),
    ],
)
def test_the_main_program(
    words: list[str],
    status: int,
    stdout: str,
    stderr: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["rallypoint", *words])
    assert cli.main() == status
    out, err = capfd.readouterr()
    assert stdout in out
    assert stderr in err


def test_rallyrun_is_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rallyrun", "--standalone"])
    assert cli.main_run() == 2
    assert capfd.readouterr().err.startswith("rallypoint run: no script given")


def test_an_output_that_is_full_or_has_no_reader(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rallypoint", "--version"])
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert cli.main() == 1
    message = "rallypoint: cannot write to the standard output: No space left on device\n"
    assert capfd.readouterr().err == message
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        assert cli.main() == 128 + signal.SIGPIPE
    assert capfd.readouterr().err == ""


def refuse(error: BaseException) -> None:
    """As a system that has no more would."""
    raise error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 1, "rallypoint: this process ran out of memory (mmap)"),
        (OSError(errno.EMFILE, "Too many"), 1, "rallypoint: this process ran out of file descrip"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    error: BaseException,
    status: int,
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["rallyrun"])
    monkeypatch.setattr(run_module, "run", lambda _: refuse(error))
    assert cli.main_run() == status
    assert capfd.readouterr().err.startswith(message)


def test_another_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rallyrun"])
    monkeypatch.setattr(run_module, "run", lambda _: refuse(FileNotFoundError(2, "none", "x")))
    with pytest.raises(FileNotFoundError):
        cli.main_run()


def test_the_old_module_passes_each_worker_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    """As torch.distributed.launch; a program that is no script may not know the flag."""
    assert run_module.launch(["--no-python", "sh"]) == 2
    assert "--no-python needs --use-env here" in capfd.readouterr().err


def test_a_store_whose_port_is_held(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: set())  # this process goes on
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        assert store(["--port", str(port)]) == 1
    err = capfd.readouterr().err
    assert err.startswith("rallypoint store: ")
    assert str(port) in err
