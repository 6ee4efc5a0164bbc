"""Hundreds of nodes over real sockets: each gets a seat of its own, and the news of a death."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.alone]  # 700 nodes need both cores

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "rendezvous_scale.py"


def test_hundreds_of_nodes() -> None:
    """The program ends with an error if a rank is missing or given twice, or a node not told."""
    command = [sys.executable, str(SCRIPT), "--nodes", "700", "--no-results"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "join_s of 700 nodes" in done.stdout
