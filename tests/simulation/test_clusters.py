"""Seeded stories of clusters in which anything fails at any time: none ends in two jobs, or stuck.

python -m tests.simulation.sim_story SEED        tells one of them again
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.simulation.sim_story import story

SEEDS = 500  # and 20,000 in `make check-long`
SMALL = 12


@pytest.mark.timeout(1200)
def test_stories() -> None:
    count = len(os.sched_getaffinity(0))
    players = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulation.sim_story", *map(str, (i, SEEDS, count))],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    told = [player.communicate()[1] for player in players]
    bad = [text for text, player in zip(told, players, strict=True) if player.returncode != 0]
    assert not bad, bad[0]


@pytest.mark.parametrize(
    ("seed", "max_size"),
    [
        pytest.param(1334, 200, id="members learn from a candidate that they were agreed on"),
        pytest.param(1354, 200, id="what ended in another job counts in this one"),
        pytest.param(4097, SMALL, id="an order comes before the word of whose job it is"),
        pytest.param(6290, SMALL, id="the word that it may leave is lost"),
    ],
)
def test_stories_that_ended_badly_once(seed: int, max_size: int) -> None:
    story(seed, max_size=max_size)
