"""How long new workers wait if those before them were lost soon after they had joined."""

from __future__ import annotations

import pytest

from rallypoint.rendezvous.job.gathering import SHORT_LIFE_S, ShortLives


@pytest.mark.parametrize(
    ("lived_s", "pauses"),
    [
        (0.2, [0, 0, 1, 2, 4, 8, 16, 32, 60, 60]),
        (15.0, [0, 0, 15, 30, 60, 120, 240, 480, 900, 900]),  # the others waited for them
    ],
)
def test_each_waits_longer_than_the_one_before(lived_s: float, pauses: list[float]) -> None:
    lives, found = ShortLives(), []
    for _ in pauses:
        lives.count(lived_s, newcomers_lost=1, others_lost=0)
        found.append(lives.pause_s)
    assert found == pauses


@pytest.mark.parametrize(
    ("lived_s", "newcomers_lost", "others_lost"), [(SHORT_LIFE_S, 1, 0), (1.0, 1, 1), (1.0, 0, 1)]
)
def test_then_nobody_waits(lived_s: float, newcomers_lost: int, others_lost: int) -> None:
    lives = ShortLives()
    for _ in range(5):
        lives.count(1.0, newcomers_lost=1, others_lost=0)
    assert lives.pause_s > 0
    lives.count(lived_s, newcomers_lost=newcomers_lost, others_lost=others_lost)
    assert lives.pause_s == 0
