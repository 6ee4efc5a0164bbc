"""What `rallypoint run --on ray` refuses before it asks Ray."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import parse
from rallypoint.cli.remote.plan import Plan, make_plan
from rallypoint.cli.run import run
from rallypoint.cli.where import where

GUIDE = Path(__file__).parents[4] / "docs/guides/ray.md"


def plan_of(*words: str) -> Plan:
    """As for two to three nodes, of two workers each."""
    options, command = parse([*words, __file__, "-x"], RunOptions, program="")
    return make_plan(options, command, {}, hosts=(), nnodes=(2, 3), workers="2")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("--on", "ray", "--hosts", "a,b"),
            "--on ray already determines the machines and the endpoint",
        ),
        (("--on", "ray", "--rdzv-endpoint", "a"), "leave out --rdzv-endpoint."),
        (("--on", "ray", "--node-rank", "1"), "leave out --node-rank."),
        (("--on", "ray", "--nnodes", "4:2"), "--nnodes is '4:2'"),
        (
            ("--cpus-per-node", "2"),
            "--cpus-per-node is only for nodes of a Ray cluster; add --on ray.",
        ),
        (
            ("--gpus-per-node", "2"),
            "--gpus-per-node is only for nodes of a Ray cluster; add --on ray.",
        ),
    ],
)
def test_flags_that_contradict_it(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert run([*words, __file__]) == 2
    assert told in capsys.readouterr().err


def test_a_script_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--on", "ray", "no.py"]) == 2
    assert "script 'no.py' does not exist" in capsys.readouterr().err


def test_ray_is_not_imported_before_it_is_asked() -> None:
    text = "import sys, rallypoint.cli.ray.on_ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0


def test_what_each_launcher_is_given() -> None:
    flags = ("--on", "ray", "--nproc-per-node", "gpu", "--gpus-per-node", "2", "--quiet")
    plan = plan_of(*flags, "--rdzv-id", "j")
    common = ["--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=a:1,b:2", "--rdzv-id=j"]
    rest = ["--nproc-per-node=2", "--quiet", "--", __file__, "-x"]
    assert plan.words(1, ("a:1", "b:2")) == [*common, "--node-rank=1", *rest]
    assert plan.words(3, ("a:1", "b:2")) == [*common, *rest]  # in the place of a lost one
    assert plan.script == __file__
    assert plan_of("-m").script == ""
    assert not any(plan.environ["RALLYPOINT_TOKEN"] in word for word in plan.words(0, ()))


def test_the_commands_of_the_guide() -> None:
    lines = re.findall(r"rallypoint run (--on ray .*)", GUIDE.read_text())
    assert len(lines) == 2
    for line in lines:
        *words, script = shlex.split(line)
        assert script == "train.py"
        assert plan_of(*words).workers == "2"


def test_where_tells_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert where([]) == 0
    assert "Ray" not in capsys.readouterr().out
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for words in ([], ["--on", "ray"]):
        assert where(words) == 0
        assert "rallypoint run --on ray --nnodes 2 train.py" in capsys.readouterr().out
