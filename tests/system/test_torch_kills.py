"""A rank that dies in the middle of backward is a PeerLostError on the others: no hang, no crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("RALLYPOINT_TEST_BACKWARD_KILLS", "4"))


@pytest.mark.parametrize("kind", ["plain", "python hook", "built-in hook", "power sgd", "fsdp"])
def test_the_others_learn_who_died(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "outcomes.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.torch_kills", kind, str(KILLS), path],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [each for outcome in json.loads(path.read_text()) for each in outcome]
    assert len(told) == 2 * KILLS
    for each in told:
        assert each["ended"] == 0, done.stderr[-3000:]
        assert each["kinds"][0] == "PeerLostError", each["trace"]
        assert "RuntimeError" in each["kinds"]
        assert each["rank"] == 1, each["words"]
        assert each["after_s"] < 1.0, each
