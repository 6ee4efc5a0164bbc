"""Ballots agree on one list per number, whatever the order of messages, without any clock."""

from __future__ import annotations

import pytest
from tests.simulation.sim_ballots import SimBallots

from rallypoint.rendezvous.consensus.rules import Rules

STEPS = 600


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.long)], ids=str
)
def test_ballots_alone_agree(seeds: range) -> None:
    agreed = 0
    for seed in seeds:
        ballots = SimBallots(seed, Rules)
        ballots.run(STEPS)  # raises with its seed
        agreed += len(ballots.decided)
    assert agreed > 20 * len(seeds)  # and they get somewhere
