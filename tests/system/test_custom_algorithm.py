"""A user's algorithm in a real job: run when it is right, refused with the place when it is not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "custom-algorithms.md"
SCRIPT = """
import numpy as np
import rallypoint as dist

dist.init_process_group()
values = np.full(100_000, dist.get_rank() + 1.0)
dist.all_reduce(values)
assert (values == 6).all()
if dist.get_rank() == 0:
    print("summed")
dist.destroy_process_group()
"""


def run(tmp_path: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "star.py").write_text(code)
    (tmp_path / "job.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "rallypoint", "run", "--standalone", "--nproc-per-node", "3"]
    return subprocess.run(
        [*command, str(tmp_path / "job.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )


def example() -> str:
    code = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code is not None
    return code[1]


def test_example_of_the_guide_runs(tmp_path: Path) -> None:
    result = run(tmp_path, example(), RALLYPOINT_ALGORITHM=str(tmp_path / "star.py"))
    assert result.returncode == 0, result.stderr
    assert "summed" in result.stdout


def test_wrong_one_is_refused(tmp_path: Path) -> None:
    wrong = example().replace("(Send(own, (0,)), receive(0, result))", "(Send(own, (0,)),)")
    result = run(tmp_path, wrong, RALLYPOINT_ALGORITHM=str(tmp_path / "star.py"))
    assert result.returncode != 0
    assert "rank 0, lane 0, step 1 (send output 0 to ranks 1, 2)" in result.stderr
    assert "rank 1 never takes this message" in result.stderr


def test_choice_by_predicted_time(tmp_path: Path) -> None:
    result = run(tmp_path, "", RALLYPOINT_LINKS="shared_memory")
    assert result.returncode == 0, result.stderr
    assert "summed" in result.stdout
