"""An agent that is paused for four seconds, or cut off from the others, costs nobody anything."""

from __future__ import annotations

import pytest
from tests.simulation.sim_cluster import SimCluster

PAUSE_S = 4.0
PHASES = 40  # of a second: when it begins, between two heartbeats


@pytest.mark.parametrize(
    ("nodes", "step"),
    [
        (2, 8),
        (3, 8),
        *(pytest.param(nodes, 1, marks=pytest.mark.long) for nodes in (2, 3)),
        (50, 20),
    ],
)
@pytest.mark.parametrize("paused", ["n0", "n1"], ids=["the coordinator", "another"])
def test_a_pause_is_no_death(paused: str, nodes: int, step: int) -> None:
    for phase in range(0, PHASES, step):
        cluster = SimCluster(seed=phase, nodes=nodes, min_nodes=nodes, max_nodes=nodes)
        cluster.start_all()
        cluster.run(10 + phase / PHASES)
        running = cluster.running()
        assert running == dict.fromkeys(cluster.names, 0)
        cluster.cut([{paused}, set(cluster.names) - {paused}])
        cluster.run(PAUSE_S)
        cluster.mend()
        cluster.run(5)
        assert cluster.running() == running, f"phase {phase}"
