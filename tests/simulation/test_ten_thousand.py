"""A job of many nodes gathers, loses its coordinator, and continues with all the others."""

from __future__ import annotations

import pytest
from tests.simulation.sim_cluster import SimCluster

from rallypoint.rendezvous.timeouts import Timeouts


@pytest.mark.timeout(600)
@pytest.mark.parametrize("nodes", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_large_job_outlives_its_coordinator(nodes: int) -> None:
    timeouts = Timeouts(
        last_call_s=1.0, heartbeat_s=5.0, missed_heartbeats=3
    )  # fewer heartbeats to simulate
    cluster = SimCluster(
        seed=10, nodes=nodes, min_nodes=nodes // 2, max_nodes=nodes, timeouts=timeouts
    )
    cluster.start_all(spread_s=1.0)
    cluster.run(8.0)
    rounds = cluster.running()
    assert len(rounds) == nodes and len(set(rounds.values())) == 1

    cluster.kill(cluster.leaders()[0])
    cluster.run(8.0)
    assert len(cluster.leaders()) == 1
    after = cluster.running()
    assert len(after) == nodes - 1 and len(set(after.values())) == 1
    assert max(after.values()) > max(rounds.values())
    cluster.check_progress()
