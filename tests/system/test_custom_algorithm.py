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

dist.init_process_group({init})
rank, ranks = dist.get_rank(), dist.get_world_size()
values = np.full(100_000, rank + 1.0)
dist.all_reduce(values{call})
assert (values == ranks * (ranks + 1) / 2).all()
if rank == 0:
    print("summed")
dist.destroy_process_group()
"""


def run(
    tmp_path: Path, code: str, *, ranks: int = 3, init: str = "", call: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """A job whose ranks say `init` when they start, and `call` in an all_reduce."""
    (tmp_path / "star.py").write_text(code)
    (tmp_path / "job.py").write_text(SCRIPT.format(init=init, call=call))
    command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
    return subprocess.run(
        [*command, "--nproc-per-node", str(ranks), "job.py"],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
        env={**os.environ, **environment},
    )


def example() -> str:
    code = re.search(r"```python[^\n]*\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert code is not None
    return code[1]


# RALLYPOINT_ALGORITHM, what is said at the start, and in the call
ASKING = (
    ("star.py", "", ""),
    ("", "algorithm='star.py'", ""),
    ("", "", ", algorithm='star.py'"),
    ("ring", "algorithm='two_tree'", ", algorithm='star.py:star'"),
)


@pytest.mark.parametrize(("variable", "init", "call"), ASKING)
@pytest.mark.parametrize("ranks", [2, 4])
def test_example_of_the_guide_runs(
    tmp_path: Path, ranks: int, variable: str, init: str, call: str
) -> None:
    result = run(
        tmp_path, example(), ranks=ranks, init=init, call=call, RALLYPOINT_ALGORITHM=variable
    )
    assert result.returncode == 0, result.stderr
    assert "summed" in result.stdout


@pytest.mark.parametrize(("variable", "init", "call"), ASKING)
def test_wrong_one_is_refused(tmp_path: Path, variable: str, init: str, call: str) -> None:
    """By every rank, before anything of it has run."""
    wrong = example().replace("(Send(own, (0,)), receive(0, result))", "(Send(own, (0,)),)")
    result = run(tmp_path, wrong, init=init, call=call, RALLYPOINT_ALGORITHM=variable)
    assert result.returncode != 0
    assert "rank 0, lane 0, step 1 (send output 0 to ranks 1, 2)" in result.stderr
    assert "rank 1 never takes this message" in result.stderr


def test_different_files_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "star.py").write_text(example() + "# newer")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "star.py").write_text(example())
    result = run(tmp_path, "", ranks=2, call=", algorithm=f'{rank}/star.py'")
    assert result.returncode != 0
    for rank in range(2):
        said = rf"rank {rank} called all_reduce\(float64\[100000\], SUM, algorithm={rank}/star.py "
        assert re.search(said + r"\(star-[0-9a-f]{8}\)\) at job.py:8", result.stderr)


def test_choice_by_predicted_time(tmp_path: Path) -> None:
    for variable, init in (("shared_memory", ""), ("", "links='shared_memory'")):
        result = run(tmp_path, "", init=init, RALLYPOINT_LINKS=variable)
        assert result.returncode == 0, result.stderr
        assert "summed" in result.stdout


def test_impossible_models_and_names_are_refused_at_the_start(tmp_path: Path) -> None:
    for init, words in (
        ("links='no_such'", "there is no link model 'no_such'"),
        ("algorithm='no_such'", "there is no algorithm 'no_such'"),
        ("algorithm='no_such.py'", "cannot load an algorithm from no_such.py"),
    ):
        result = run(tmp_path, "", ranks=2, init=init)
        assert result.returncode != 0
        assert words in result.stderr
