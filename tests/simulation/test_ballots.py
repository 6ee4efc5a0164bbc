"""Ballots agree on one list per number, whatever the order of messages, without any clock."""

from __future__ import annotations

import pytest
from tests.simulation.sim_ballots import SimBallots

from rallypoint.rendezvous.consensus.rules import Rules

SEEDS, STEPS = 1000, 600


@pytest.mark.timeout(600)
def test_ballots_alone_agree() -> None:
    agreed = 0
    for seed in range(SEEDS):
        ballots = SimBallots(seed, Rules)
        ballots.run(STEPS)  # raises with its seed
        agreed += len(ballots.decided)
    assert agreed > 20 * SEEDS  # and they get somewhere
