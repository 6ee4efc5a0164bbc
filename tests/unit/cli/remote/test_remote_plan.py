"""What each host's launcher is given, and what the starter refuses before it connects; lists of
hosts as Open MPI, MPICH, DeepSpeed and Horovod write them, and those that cannot be.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rallypoint.base.errors import CallerError, InvalidArgumentError
from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import UsageError, parse
from rallypoint.cli.read_job import read_job
from rallypoint.cli.remote.plan import FORWARDED, Plan, RemoteHost, read_hosts, read_plan
from rallypoint.cli.run import run
from rallypoint.cluster.remote_shell import SSH, command_on

DOCS = Path(__file__).parents[4] / "docs"
GUIDE = DOCS / "guides/several-machines.md"
POINTS = ("a:1", "b:2", "c:3")


def plan_of(*words: str, **environ: str) -> Plan:
    options, command = parse([*words, __file__, "-x"], RunOptions, program="", environ=environ)
    return read_plan(options, command, environ)


def test_three_hosts() -> None:
    plan = plan_of("--hosts", "a,b:4,me@c", "--nproc-per-node", "2", "--rdzv-id", "j", "--quiet")
    assert (plan.fewest, plan.most, plan.rsh) == (3, 3, SSH)
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=a:1,b:2,c:3", "--rdzv-id=j"]
    common = ["--nnodes=3", *meeting]
    for number, workers in enumerate("242"):
        own = [f"--node-rank={number}", f"--nproc-per-node={workers}", "--quiet"]
        assert plan.words(number, POINTS) == [*common, *own, "--", __file__, "-x"]


def test_a_launcher_reads_what_it_is_given() -> None:
    plan = plan_of("--hosts", "a,b,c", "--nnodes", "2:", "--log-prefix", "{rank} = ", "-r", "0:1")
    options, command = parse(plan.words(1, POINTS), RunOptions, program="")
    job, notes = read_job(options, command, {})
    found = job.rendezvous
    assert found is not None
    assert (found.min_nodes, found.max_nodes, found.node_rank) == (2, 3, 1)
    assert [str(each) for each in found.endpoints] == list(POINTS)
    assert job.logs == plan.job.logs
    assert job.logs.prefix == "{rank} = "
    assert (job.run_id, notes) == (plan.run_id, [])


def test_one_host_meets_nobody() -> None:
    plan = plan_of("--hosts", "a:4", "--rdzv-id", "j")
    assert plan.words(0, ()) == [
        "--nnodes=1", "--rdzv-id=j", "--nproc-per-node=4", "--", __file__, "-x",
    ]  # fmt: skip


def test_hosts_beyond_the_most_are_spares() -> None:
    plan = plan_of("--hosts", "a,b,c", "--nnodes", "2")
    ranks = [[word for word in plan.words(n, POINTS) if "rank" in word] for n in range(3)]
    assert ranks == [["--node-rank=0"], ["--node-rank=1"], []]


def test_what_goes_with_the_workers() -> None:
    environ = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "p", "HOME": "/me", "MINE": "1", "OTHER": "2"}
    plan = plan_of("--hosts", "a", "--env", "MINE", "--env", "OTHER", **environ)
    token = plan.environ["RALLYPOINT_TOKEN"]
    rest = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "p", "MINE": "1", "OTHER": "2"}
    assert plan.environ == {**rest, "RALLYPOINT_TOKEN": token}
    assert len(token) == 32
    assert token not in repr(plan)
    assert plan_of("--hosts", "a").environ["RALLYPOINT_TOKEN"] != token
    assert plan_of("--hosts", "a", RALLYPOINT_TOKEN="x").environ == {"RALLYPOINT_TOKEN": "x"}


def test_the_reference_names_what_is_passed_on() -> None:
    text = (DOCS / "reference/environment.md").read_text()
    sentence = re.search(r"passes on the variables that begin with ([^.]*?), and those", text)
    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == set(FORWARDED)


def test_a_token_file_stays_here(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    plan = plan_of("--hosts", "a", "--token-file", str(tmp_path / "token"), "--require-token")
    assert plan.environ["RALLYPOINT_TOKEN"] == "secret"
    assert not any("secret" in word or "token-file" in word for word in plan.words(0, ()))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--standalone"],
            "--hosts already determines the machines and the endpoint; leave",
        ),
        (["--node-rank", "0"], "leave out --node-rank."),
        (["--master-addr", "a"], "leave out --master-addr."),
        (["--rdzv-endpoint", "a"], "leave out --rdzv-endpoint."),
        (["--on", "slurm"], "leave out --on."),
        (["--nnodes", "3"], "--nnodes is 3, which is more than the number of hosts, 2"),
        (["--nnodes", "1:3"], "--nnodes is 1:3, which is more than the number of hosts, 2"),
        (["--nnodes", "3:"], "--nnodes is '3:2'; it must be"),
        (["--nnodes", "1"], "--nnodes is 1, but there are 2 hosts; name one"),
        (["--nnodes", "x"], "--nnodes is 'x'"),
        (["--env", "NONE"], "--env NONE: this variable is not set here; set it, as in NONE=..."),
        (["--rsh", ""], "--rsh is empty; give a command"),
        (["--rsh", "a 'b"], "--rsh a 'b: No closing quotation"),
        (["--nproc-per-node", "many"], "--nproc-per-node is 'many'"),
        (["--tee", "9"], "--tee: '9' does not name streams"),
        (["--rdzv-conf", "nonsense=1"], "--rdzv-conf: c10d has no option 'nonsense'"),
        (["--hostfile", "f"], "--hosts and --hostfile both name the hosts"),
    ],
)
def test_refusals(words: list[str], sentence: str) -> None:
    with pytest.raises(CallerError) as caught:
        plan_of("--hosts", "a,b", *words)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_script_is_a_file() -> None:
    for command, sentence in ((["-"], "'-' is standard input, which"), ([], "no script given")):
        with pytest.raises(CallerError, match=sentence):
            read_plan(RunOptions({"--hosts": "a"}), command, {})


def test_what_is_about_hosts_needs_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--rsh", "srun"], ["--env", "HOME"]):
        assert run([*words, __file__]) == 2
        assert f"{words[0]} needs --hosts or --hostfile" in capsys.readouterr().err


def test_the_commands_of_the_guide() -> None:
    lines = [line for line in GUIDE.read_text().splitlines() if line.startswith("rallypoint run")]
    assert len(lines) == 3
    for line in lines:
        *words, script = shlex.split(line)[2:]
        assert script == "train.py"
        plan = plan_of(*words)
        assert len(plan.hosts) in (2, 3)
        assert (plan.rsh == SSH) is ("--rsh" not in words)


def test_commands() -> None:
    program = command_on("localhost", ("ssh",), "a.module")
    assert program[1:] == ["-P", "-m", "a.module"]
    far = "no-such-host.invalid"
    assert command_on(far, ("ssh", "-x"), "a.module") == ["ssh", "-x", far, *program]
    words = ("kubectl", "exec", "-i", "pod-{host}", "--")
    expected = ["kubectl", "exec", "-i", f"pod-{far}", "--", *program]
    assert command_on(far, words, "a.module") == expected
    for name in ("-oProxyCommand=x", "me@-oX", "-oX@a", "", "a\nb"):
        with pytest.raises(InvalidArgumentError, match="is not a host"):
            command_on(name, ("ssh",), "a.module")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", "", "a")]),
        ("a,b:4", [("a", "", "a"), ("b", "4", "b")]),
        (" a , b ,", [("a", "", "a"), ("b", "", "b")]),
        ("me@a:2,10.0.0.7", [("me@a", "2", "a"), ("10.0.0.7", "", "10.0.0.7")]),
        ("fd77::1,[fd77::2]:4", [("fd77::1", "", "fd77::1"), ("fd77::2", "4", "fd77::2")]),
        ("me@[fd77::2]", [("me@fd77::2", "", "fd77::2")]),
        ("localhost:2", [("localhost", "2", "localhost")]),
        # Several "hosts" that are this machine, to try what several would do.
        (
            "localhost:2,127.0.0.1",
            [("localhost", "2", "localhost"), ("127.0.0.1", "", "127.0.0.1")],
        ),
    ],
)
def test_lists(text: str, expected: list[tuple[str, str, str]]) -> None:
    found = read_hosts(RunOptions({"--hosts": text}))
    assert [(host.name, host.workers, host.address) for host in found] == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "--hosts names no host."),
        (",", "--hosts names no host."),
        ("a,b:0", "'b:0' is not a host; write HOST, HOST:N or USER@HOST:N"),
        ("a:four", "'a:four' is not a host"),
        ("a:", "'a:' is not a host"),
        (":4", "':4' is not a host"),
        ("@a", "'@a' is not a host"),
        ("[fd77::1]4", r"'\[fd77::1\]4' is not a host"),
        ("-oProxyCommand=true", "'-oProxyCommand=true' is not a host"),
        ("me@-x", "'me@-x' is not a host"),
        ("-oX@a:2", "'-oX@a:2' is not a host"),
        ("[-oX]:2", r"'\[-oX\]:2' is not a host"),
        ("a b", "'a b' is not a host"),
        ("a\x1b[2J", r"'a\\x1b\[2J' is not a host"),
        ("a,b,me@a:4", "names a twice; name it once with its number of workers, as in a:8"),
        ("a,localhost", "other hosts cannot reach this one as localhost"),
    ],
)
def test_lists_that_cannot_be(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        read_hosts(RunOptions({"--hosts": text}))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# ours\na slots=4   # Open MPI, DeepSpeed, Horovod\n\nb:2\n  c\nme@d slots=3 max_slots=6\n"
    )
    assert read_hosts(RunOptions({"--hostfile": str(path)})) == (
        RemoteHost("a", "4"),
        RemoteHost("b", "2"),
        RemoteHost("c", ""),
        RemoteHost("me@d", "3"),
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a\nb slots=no\n", "line 2: 'slots=no' is not understood; a line is HOST, HOST:N or"),
        ("a:2 slots=2\n", "line 1: 'slots=2' is not understood"),
        ("a cpu=2\n", "line 1: 'cpu=2' is not understood"),
        ("# nobody\n", "names no host"),
        ("a\na\n", "names a twice"),
    ],
)
def test_files_that_cannot_be(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        read_hosts(RunOptions({"--hostfile": str(path)}))
    assert f"--hostfile {path}" in str(caught.value)


def test_one_way_of_naming_them() -> None:
    with pytest.raises(UsageError, match="--hosts and --hostfile both name the hosts; give one"):
        read_hosts(RunOptions({"--hosts": "a", "--hostfile": "f"}))
    with pytest.raises(UsageError, match=r"--hostfile /none cannot be read \(No such file or dir"):
        read_hosts(RunOptions({"--hostfile": "/none"}))
