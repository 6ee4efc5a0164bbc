"""What each host's launcher is given, and what the starter refuses before it connects."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rallypoint.base.errors import CallerError, InvalidArgumentError
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.options import parse
from rallypoint.cli.remote.plan import FORWARDED, Plan, read_plan
from rallypoint.cli.run import read_job, run
from rallypoint.cluster.remote_shell import SSH, command_on

DOCS = Path(__file__).parents[4] / "docs"
GUIDE = DOCS / "guides/several-machines.md"
POINTS = ("a:1", "b:2", "c:3")


def plan_of(*words: str, **environ: str) -> Plan:
    values, command = parse([*words, __file__, "-x"], FLAGS, program="", environ=environ)
    return read_plan(values, command, environ, read=read_job)


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
    values, command = parse(plan.words(1, POINTS), FLAGS, program="", environ={})
    job, notes = read_job(values, command, {})
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
            "--hosts already says which machines take part and where they meet; leave",
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
            read_plan({"--hosts": "a"}, command, {}, read=read_job)


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
