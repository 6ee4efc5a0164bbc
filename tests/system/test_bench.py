"""`rallypoint bench --calibrate`: what it writes can be used where link models are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.schedule.cost.links import read_model

pytestmark = pytest.mark.system


def rallypoint(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rallypoint", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
    )


def test_a_model_is_measured_and_used(tmp_path: Path) -> None:
    made = rallypoint(
        *("bench", "--calibrate", "--ranks", "3,2", "--rounds", "2", "--out", "mine.toml"),
        cwd=tmp_path,
    )
    assert made.returncode == 0, made.stderr
    assert re.search(r"126 predictions .* half are within [0-9.]+%", made.stdout)
    model = read_model(str(tmp_path / "mine.toml"))
    assert (model.name, model.measured_ranks) == ("mine", 3)
    used = rallypoint(
        *("simulate", "all_reduce", "--ranks", "3", "--bytes", "1M", "--links", "mine.toml"),
        cwd=tmp_path,
    )
    assert used.returncode == 0, used.stderr
    assert "direct_two_shot" in used.stdout


def test_command_lines_that_are_wrong(tmp_path: Path) -> None:
    for words, message in (
        (["--ranks", "2"], "say what to measure: --calibrate, or an operation"),
        (["--calibrate", "--ranks", "2,x"], "--ranks needs integers of at least 2, not 'x'"),
        (["--calibrate", "--rounds", "1"], "--rounds needs integers of at least 2, not '1'"),
        (["--calibrate", "--out", "mine"], "--out mine must end in .toml"),
        (["--calibrate", "more"], "unexpected argument 'more'"),
    ):
        result = rallypoint("bench", *words, cwd=tmp_path)
        assert (result.returncode, message in result.stderr) == (2, True), result.stderr
