"""The commands of guides, as a reader types them.

Those of Slurm, mpirun and ssh are run by test_slurm.py, test_launched.py and test_remote_plan.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import Block, blocks_tested_by
from tests.system.test_launched import LIMIT_S, NOT_OURS

from rallypoint.lab.script import script

pytestmark = pytest.mark.system

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
TRAIN = """
import os, sys
import numpy as np
import rallypoint as dist
dist.init_process_group()
numbers = np.ones(3)
dist.all_reduce(numbers)
os.write(1, f"{numbers[0]:.0f} workers, {sys.argv[1:]}\\n".encode())
dist.destroy_process_group()
"""


BLOCKS = blocks_tested_by("tests/system/test_guides.py::test_one_machine")


@pytest.mark.parametrize(
    "block",
    [pytest.param(BLOCKS[0], marks=pytest.mark.everyday), *BLOCKS[1:]],
    ids=lambda block: block.place,
)
def test_one_machine(block: Block, tmp_path: Path) -> None:
    text = block.text
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "train.sh").write_text(f"#!/bin/sh\nexec {sys.executable} train.py\n")
    (tmp_path / "train.sh").chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in NOT_OURS}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        ["sh", "-ec", text],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = re.findall(r"--nproc.per.node[ =](\d+)", text)
    for size in sizes or [str(len(os.sched_getaffinity(0)))]:
        ending = ["--epochs", "10"] if "--epochs" in text else []
        assert f"{size} workers, {ending}" in done.stdout
    assert ("local rank" in done.stderr) == ("RALLYPOINT_DEBUG" in text)
    kept = 2 if "--log-dir" in text else 0
    assert len(list(tmp_path.glob("logs/latest/attempt_0/*/stdout.log"))) == kept
    assert ("[1] " in done.stdout) == ("--log-prefix" in text)


@pytest.mark.everyday
def test_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is taken by Kubernetes: tests/unit/docs/test_manifests.py."""
    text = (GUIDES / "kubernetes.md").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"^rallypoint (script .*) > jobset.yaml$", text, re.MULTILINE)
    assert script(line.split()[1:]) == 0
    assert 'nvidia.com/gpu: "8"' in capsys.readouterr().out
