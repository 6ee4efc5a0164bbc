"""What `rallypoint run --on ray` refuses before it asks Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rallypoint.cli.run import run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--on", "ray", "--hosts", "a,b"), "--on ray says which machines take part and where"),
        (("--on", "ray", "--rdzv-endpoint", "a"), "leave out --rdzv-endpoint."),
        (("--on", "ray", "--node-rank", "1"), "leave out --node-rank."),
        (("--on", "ray", "--nnodes", "4:2"), "--nnodes is '4:2'"),
        (("--cpus-per-node", "2"), "--cpus-per-node is about nodes of Ray's; add --on ray."),
        (("--gpus-per-node", "2"), "--gpus-per-node is about nodes of Ray's; add --on ray."),
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
    text = "import sys, rallypoint.cli.ray.entry; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], check=False).returncode == 0
