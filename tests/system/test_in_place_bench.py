"""Benchmarks of in-place recovery measure what they say, and fail if a loss is not survived."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--no-results", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_survivors_of_a_kill_go_on(seed: int) -> None:
    told = run("in_place_peers.py", "--seed", str(seed), "--trials", "1")
    assert told.splitlines()[-2].split()[:3] == ["rallypoint", "1", "0"], told


def test_a_newcomer_gets_the_bytes_of_the_others() -> None:
    """The program itself compares them."""
    size = str(8 << 20)
    told = run("in_place.py", "transfer", "--ranks", "3", "--rounds", "1", "--bytes", size)
    assert "2 here" in told
