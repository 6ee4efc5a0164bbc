"""PyTorch's own tests of torch.distributed, against our backend: nothing that gloo passes fails.

At world size 2, with PyTorch 2.14 or newer; with RALLYPOINT_TEST_TORCH_SUITE=all (make check-long)
with any, at 3 and 4 too, and gloo is asked in the same run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

IS_LONG = os.environ.get("RALLYPOINT_TEST_TORCH_SUITE") == "all"

pytest.importorskip("torch")

from rallypoint.pytorch.versions import HAS_BACKENDS  # noqa: E402

pytestmark = [
    pytest.mark.system,
    pytest.mark.needs_torch,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (HAS_BACKENDS or IS_LONG),
        reason="PyTorch before 2.14: make test-torch runs its own tests, with the newest one",
    ),
]

# Before 2.14, PyTorch asks for gloo by name in its function; ours is in
# tests/unit/pytorch/test_rallypoint_group.py.
GLOO_ONLY = (
    set()
    if HAS_BACKENDS
    else {
        "test_monitored_barrier_gloo",
        "test_monitored_barrier_gloo_subgroup",
    }
)
LEAST_PASSED = {2: 90, 3: 90, 4: 93} if HAS_BACKENDS else {2: 88, 3: 88, 4: 91}


def run_suite(backend: str, world_size: int, directory: Path) -> dict[str, str]:
    """What became of each test."""
    path = directory / f"{backend}.json"
    log = directory / f"{backend}.log"
    with log.open("wb") as output:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.system.torch_suite",
                backend,
                str(world_size),
                path,
            ],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TMPDIR": str(directory)},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert path.exists(), log.read_text()[-3000:]
    return {name: outcome for name, (outcome, _) in json.loads(path.read_text()).items()}


@pytest.mark.parametrize("world_size", [2, 3, 4] if IS_LONG else [2])
def test_nothing_that_gloo_passes_fails(world_size: int, tmp_path: Path) -> None:
    ours = run_suite("rallypoint", world_size, tmp_path)
    failed = {name for name, outcome in ours.items() if outcome == "failed"}
    assert failed <= GLOO_ONLY, (tmp_path / "rallypoint.log").read_text()[-20_000:]
    passed = {name for name, outcome in ours.items() if outcome == "passed"}
    print(f"world size {world_size}: {len(passed)} passed, {len(failed)} only for gloo")
    assert len(passed) >= LEAST_PASSED[world_size]
    if IS_LONG:
        gloos = run_suite("gloo", world_size, tmp_path)
        passed_by_gloo = {name for name, outcome in gloos.items() if outcome == "passed"}
        print(f"world size {world_size}: gloo passed {len(passed_by_gloo)}")
        assert passed_by_gloo - GLOO_ONLY <= passed
