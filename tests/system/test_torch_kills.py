"""A rank that dies in backward is a PeerLostError on the others: no hang, no crash."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import SOON_S, draw_seed

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("RALLYPOINT_TEST_BACKWARD_KILLS", "1"))
KINDS = ("plain", "python hook", "built-in hook", "power sgd", "fsdp")


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[dict[str, Any]]]]:
    directory = tmp_path_factory.mktemp("kills")
    path = directory / "outcomes.json"
    numbers = [str(draw_seed(request)), str(KILLS)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.torch_kills", *numbers, path],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(directory)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr[-3000:])
    assert done.returncode == 0
    told: dict[str, list[list[dict[str, Any]]]] = json.loads(path.read_text())
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_learn_who_died(
    kind: str, outcomes: dict[str, list[list[dict[str, Any]]]]
) -> None:
    told = [each for outcome in outcomes[kind] for each in outcome]
    assert len(told) == 2 * KILLS
    for each in told:
        assert each["ended"] == 0, each
        assert each["kinds"][0] == "PeerLostError", each["trace"]
        assert "RuntimeError" in each["kinds"]
        assert each["rank"] == 1, each["words"]
        assert each["after_s"] < SOON_S, each
    slowest = max(each["after_s"] for each in told)
    print(f"{kind}: {len(told)} ranks told, the slowest after {slowest:.3f} s")
