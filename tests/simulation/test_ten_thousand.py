"""One job of 10,000 nodes gathers, loses its coordinator, and goes on: all of them, but for one."""

from __future__ import annotations

import pytest
from tests.simulation.sim_cluster import SimCluster

from rallypoint.rendezvous.timeouts import Timeouts

NODES = 10_000


@pytest.mark.timeout(600)
def test_ten_thousand_nodes() -> None:
    timeouts = Timeouts(last_call_s=1.0, beat_s=5.0, missed_beats=3)  # fewer beats to simulate
    cluster = SimCluster(
        seed=10, nodes=NODES, min_nodes=NODES // 2, max_nodes=NODES, timeouts=timeouts
    )
    cluster.start_all(spread_s=1.0)
    cluster.run(8.0)
    rounds = cluster.running()
    assert len(rounds) == NODES and len(set(rounds.values())) == 1

    cluster.kill(cluster.leaders()[0])
    cluster.run(8.0)
    assert len(cluster.leaders()) == 1
    after = cluster.running()
    assert len(after) == NODES - 1 and len(set(after.values())) == 1
    assert max(after.values()) > max(rounds.values())
    cluster.check_progress()
