"""PyTorch's distributed features compute the same with our backend as with gloo."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("torch_features.py")
FEATURES = re.findall(r"^@feature\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


def launch(backend: str, directory: Path) -> dict[str, Any]:
    path = directory / f"{backend}.json"
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "rallypoint", "run", "--nproc-per-node", "2"],
            SCRIPT,
            backend,
            path,
        ],
        env={**os.environ, "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    results: dict[str, Any] = json.loads(path.read_text())
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("features")
    return {backend: launch(backend, directory) for backend in ("rallypoint", "gloo")}


@pytest.mark.exact
@pytest.mark.parametrize("name", FEATURES)
def test_computes_the_same_as_with_gloo(name: str, results: dict[str, dict[str, Any]]) -> None:
    ours, gloos = results["rallypoint"][name], results["gloo"][name]
    assert not isinstance(ours, str), ours
    assert ours == pytest.approx(gloos, rel=1e-4, abs=1e-6)
    assert len(ours) > 1
