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


BENCHMARK = """
import sys
sys.path.insert(0, {benchmarks!r})
import shared_gpu, new_weights_torch
shared_gpu._PAUSE_S, shared_gpu._BLOCK_S, shared_gpu._COPIED = 0, 0.001, [8, 65536]
shared_gpu._FLAT_BYTES, new_weights_torch.BUCKET_BYTES = 1 << 18, 50_000
if shared_gpu.is_worker():
    from tests import stand_in
    stand_in.install()
shared_gpu.main()
"""


def test_the_benchmarks_that_wait_for_a_gpu(tmp_path: Path) -> None:
    """Of new weights, which the program itself compares, and of copies."""
    pytest.importorskip("torch")
    script = tmp_path / "benchmark.py"
    script.write_text(BENCHMARK.format(benchmarks=str(REPOSITORY / "benchmarks")))
    words = ["--what", "weights", "copies", "--weights", "1000000", "--repeats", "1"]
    done = subprocess.run(
        [sys.executable, str(script), "--device", "cpu", "--no-results", *words],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(REPOSITORY), *sys.path))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks share a GPU" in done.stderr
    for row in ("weights flat", "weights in buckets", "weights one by one", "copy of 64 KiB"):
        assert row in done.stdout, done.stdout
    columns = done.stdout.splitlines()[0]
    assert "aim" in columns
    assert "all to host" in columns
