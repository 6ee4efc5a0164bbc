"""`rallypoint bench --calibrate`: what it writes can be used where link models are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.schedule.cost.links import read_model

pytestmark = pytest.mark.system


def rallypoint(*words: str, cwd: Path) -> str:
    """What it prints."""
    command = [sys.executable, "-m", "rallypoint", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_model_is_measured_and_used(tmp_path: Path) -> None:
    made = rallypoint(
        *("bench", "--calibrate", "--ranks", "3,2", "--rounds", "2", "--out", "mine.toml"),
        cwd=tmp_path,
    )
    assert re.search(r"126 predictions .* half are within [0-9.]+%", made)
    model = read_model(str(tmp_path / "mine.toml"))
    assert (model.name, model.measured_ranks) == ("mine", 3)
    used = rallypoint(
        *("simulate", "all_reduce", "--ranks", "3", "--bytes", "1M", "--links", "mine.toml"),
        cwd=tmp_path,
    )
    assert "direct_two_shot" in used
