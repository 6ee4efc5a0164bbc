"""accelerate, pytorch-lightning and transformers train as they do with gloo, where installed.

.venv/bin/pip install torch==2.13.0, then .venv/bin/pip install --group torch-libraries
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import REQUIRE_ALL

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(300)]

PACKAGES = {
    "accelerate": "accelerate",
    "lightning": "pytorch_lightning",
    "transformers": "transformers",
}


@pytest.mark.parametrize("library", PACKAGES)
def test_losses_are_those_with_gloo(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[library]) is None and not REQUIRE_ALL:
        pytest.skip(f"{PACKAGES[library]} is not installed (pip install --group torch-libraries)")
    path = tmp_path / "losses.json"
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "rallypoint", "run", "--nproc-per-node", "2"],
            Path(__file__).with_name("torch_libraries.py"),
            library,
            path,
        ],
        env={**os.environ, "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    losses = json.loads(path.read_text())
    assert losses["rallypoint"] == pytest.approx(losses["gloo"], rel=1e-4)
    assert len(losses["gloo"]) > 4
