"""A user's algorithm in a real job, by each way to ask for it.

What is refused, and what ranks that differ are told, is held by
tests/unit/process_group/test_algorithms.py.
"""

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

dist.init_process_group({init})
rank, ranks = dist.get_rank(), dist.get_world_size()
values = np.full(100_000, rank + 1.0)
dist.all_reduce(values{call})
assert (values == ranks * (ranks + 1) / 2).all()
if rank == 0:
    print("summed")
dist.destroy_process_group()
"""


def expect_sum(directory: Path, *, init: str = "", call: str = "", **environ: str) -> None:
    """In a job whose ranks say `init` when they start, and `call` in an all_reduce."""
    (directory / "job.py").write_text(SCRIPT.format(init=init, call=call))
    command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "3", "job.py"],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, done.stderr
    assert "summed" in done.stdout


def example() -> str:
    code = re.search(r"```python[^\n]*\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code is not None
    return code[1]


# RALLYPOINT_ALGORITHM, what is said at the start, and in the call
ASKING = (
    pytest.param("star.py", "", "", id="variable", marks=pytest.mark.everyday),
    pytest.param("", "algorithm='star.py'", "", id="start"),
    pytest.param("", "", ", algorithm='star.py'", id="call"),
    pytest.param("ring", "algorithm='two_tree'", ", algorithm='star.py:star'", id="all three"),
)


@pytest.mark.parametrize(("variable", "init", "call"), ASKING)
def test_example_of_the_guide_runs(tmp_path: Path, variable: str, init: str, call: str) -> None:
    (tmp_path / "star.py").write_text(example())
    expect_sum(tmp_path, init=init, call=call, RALLYPOINT_ALGORITHM=variable)


def test_choice_by_predicted_time(tmp_path: Path) -> None:
    expect_sum(tmp_path, RALLYPOINT_LINKS="shared_memory")
    expect_sum(tmp_path, init="links='shared_memory'", RALLYPOINT_LINKS="")
