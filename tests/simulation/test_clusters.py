"""Seeded stories of clusters in which anything fails at any time: none ends in two jobs, or stuck.

python -m rallypoint.testing.sim_story SEED        tells one of them again
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SEEDS = 1000


@pytest.mark.timeout(1200)
def test_stories() -> None:
    count = len(os.sched_getaffinity(0))
    players = [
        subprocess.Popen(
            [sys.executable, "-m", "rallypoint.testing.sim_story", *map(str, (i, SEEDS, count))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    told = [player.communicate()[1] for player in players]
    bad = [text for text, player in zip(told, players, strict=True) if player.returncode != 0]
    assert not bad, bad[0]
