"""Libraries train on our engine as they do with gloo, chosen by name or by the switch at launch.

    .venv/bin/pip install torch==2.13.0, then .venv/bin/pip install --group torch-libraries

RALLYPOINT_TEST_LIBRARIES=long runs those too that take minutes to install, and DeepSpeed, which
compiles at its first start (make check-long).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import REQUIRE_ALL

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(600)]

IS_LONG = os.environ.get("RALLYPOINT_TEST_LIBRARIES") == "long"
PACKAGES = {"lightning": "pytorch_lightning"}  # where it differs from the library's name
is_long = pytest.mark.skipif(not IS_LONG, reason="only in make check-long")


def installed(*libraries: str) -> list[str]:
    """Those that are installed; all, where a missing one is a failure."""
    found = [each for each in libraries if importlib.util.find_spec(PACKAGES.get(each, each))]
    if not found or (REQUIRE_ALL and len(found) < len(libraries)):
        pytest.skip(
            "libraries that train on PyTorch are not installed: "
            ".venv/bin/pip install --group torch-libraries"
        )
    return found


def run(directory: Path, *words: object) -> Any:
    """What a program of tests writes down as its last argument."""
    path = directory / "results.json"
    environ = {**os.environ, "TMPDIR": str(directory), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words), path],
        env={**environ, "OMP_NUM_THREADS": "1"},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(path.read_text()), done.stderr


def train(directory: Path, how: str, libraries: list[str], *flags: str) -> tuple[Any, str]:
    """Losses by library, and what was said on stderr."""
    launch = ("-m", "rallypoint", "run", "--nproc-per-node", "2", *flags)
    script = Path(__file__).with_name("torch_libraries.py")
    results, told = run(directory, *launch, script, how, ",".join(libraries))
    return results, str(told)


def check(results: dict[str, list[list[float]]]) -> None:
    """What was trained with gloo, and then with ours, has the same losses."""
    for library, (with_gloo, with_ours) in results.items():
        assert with_ours == pytest.approx(with_gloo, rel=1e-4), library
        assert len(with_gloo) > 4


@pytest.mark.seldom
def test_losses_by_name_are_those_with_gloo(tmp_path: Path) -> None:
    libraries = installed("accelerate", "lightning", "transformers", "torchmetrics")
    check(train(tmp_path, "named", libraries)[0])


def test_losses_by_the_switch_alone_are_those_with_gloo(tmp_path: Path) -> None:
    """Scripts that name no backend, and a library that knows three names."""
    libraries = installed("accelerate", "ignite")
    if IS_LONG:
        libraries += installed("lightning", "transformers")
    results, told = train(tmp_path, "switch", libraries, "--as-gloo")
    check(results)
    assert told.count("RALLYPOINT_AS_GLOO=1: process groups of gloo run on Rallypoint's") == 1


def test_torchft_replicas_heal(tmp_path: Path) -> None:
    installed("torchft")
    check_torchft(tmp_path, "rallypoint")


@pytest.mark.parametrize("group", ["rallypoint", "reconfigure"])
def test_torchft_nightly_with_its_group_and_torchs_own(tmp_path: Path, group: str) -> None:
    if not any(importlib.metadata.distributions(name="torchft-nightly")):
        pytest.skip("only in make check-long: torchft-nightly, which needs PyTorch 2.14")
    check_torchft(tmp_path, group)


def check_torchft(directory: Path, group: str) -> None:
    """With gloo nothing is killed: the losses and weights must be the same."""
    script = Path(__file__).with_name("torch_torchft.py")
    expected, _ = run(directory, script, "gloo", -1)
    results, _ = run(directory, script, group, 3)
    assert len(expected[0]["losses"]) == 6
    for found, right in zip(results, expected, strict=True):
        assert found["weights"] == pytest.approx(right["weights"], rel=1e-5)
        assert set(found["losses"]) >= {"0", "3", "4", "5"}  # one replica's second life saw 3 to 5
        for step, loss in found["losses"].items():
            assert loss == pytest.approx(right["losses"][step], rel=1e-5)


@is_long
def test_deepspeed_zero_by_name(tmp_path: Path) -> None:
    """It keeps groups for the life of the process."""
    libraries = installed("deepspeed")
    losses = [train(tmp_path, how, libraries)[0]["deepspeed"][0] for how in ("gloo", "rallypoint")]
    check({"deepspeed": losses})
