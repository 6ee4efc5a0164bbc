"""Seeded stories of clusters in which anything fails at any time: none ends in two jobs, or stuck.

python -m tests.simulation.sim_story SEED        tells one of them again
"""

from __future__ import annotations

import pytest
from tests.simulation.sim_story import first_violation, story

SEEDS, OFTEN = 500, 60  # in `make test`; 20,000 in `make check-long`
STRIPE = 20
SMALL = 12


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(
            range(begin, begin + STRIPE),
            id=f"{begin}-{begin + STRIPE - 1}",
            marks=[pytest.mark.long] if begin >= OFTEN else [],
        )
        for begin in range(0, SEEDS, STRIPE)
    ],
)
def test_stories(seeds: range) -> None:
    bad = first_violation(seeds)
    assert not bad, bad


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
