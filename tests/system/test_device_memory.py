"""Deaths amid calls in device memory, on the stand-in for a GPU: see device_kills.py.

RALLYPOINT_TEST_KILLS=200 is the long run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]
KILLS = int(os.environ.get("RALLYPOINT_TEST_KILLS", "8"))
LIMIT_S = 120 + 20 * KILLS
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.timeout(LIMIT_S + 60)
def test_kills_at_every_point(seed: int) -> None:
    pytest.importorskip("torch")
    script = Path(__file__).parent / "device_kills.py"
    done = subprocess.run(
        [sys.executable, str(script), str(KILLS), str(seed)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), *sys.path))},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.stdout == f"{KILLS} kills, 0 wrong, seed {seed}\n", done.stdout + done.stderr
