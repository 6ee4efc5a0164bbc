"""kill -9 of a random rank at random moments inside random collectives and messages."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import SOON_S

pytestmark = [pytest.mark.system, pytest.mark.alone]  # it looks at /dev/shm

KILLS = int(os.environ.get("RALLYPOINT_TEST_COLLECTIVE_KILLS", "20"))
RANKS = 4


@pytest.mark.timeout(60 + 20 * KILLS)
def test_every_survivor_is_told_who_died(seed: int) -> None:
    before = set(Path("/dev/shm").iterdir())
    program = [sys.executable, str(Path(__file__).with_name("random_kills.py"))]
    times: list[float] = []
    with subprocess.Popen(
        [*program, str(seed), str(KILLS), str(RANKS)], stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            seen = json.loads(line)
            assert seen["ready"] == RANKS, seen
            survivors = set(range(RANKS)) - {seen["victim"]}
            assert {told["rank"] for told in seen["told"]} == survivors, seen
            for told in seen["told"]:
                assert (told["kind"], told["culprit"]) == ("PeerLostError", seen["victim"]), seen
                times.append(told["after_s"])
            assert sorted(seen["statuses"]) == [-9, *[0] * (RANKS - 1)], seen
    assert run.returncode == 0
    assert len(times) == KILLS * (RANKS - 1)
    print(f"{KILLS} kills: told after {statistics.median(times):.3f} s, at most {max(times):.3f} s")
    assert max(times) < SOON_S
    assert set(Path("/dev/shm").iterdir()) <= before
