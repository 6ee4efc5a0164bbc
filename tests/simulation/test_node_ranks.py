"""Nodes with a rank of their own (--node-rank): whoever is started again gets it back."""

from __future__ import annotations

import pytest
from tests.simulation.sim_cluster import SimCluster

from rallypoint.rendezvous.job.reports import Outcome


def cluster_of_two() -> SimCluster:
    cluster = SimCluster(seed=0, nodes=3, min_nodes=2, max_nodes=2, wishes=(0, 1, 1))
    for name in ("n0", "n1"):
        cluster.start(name)
    cluster.run(5.0)
    assert cluster.running() == {"n0": 0, "n1": 0}
    return cluster


@pytest.mark.parametrize("name", ["n1", "n2"], ids=["the same machine", "another one"])
@pytest.mark.parametrize("after_s", [1.0, 3.0, 6.0])
def test_a_machine_that_crashed_gives_its_rank_back(name: str, after_s: float) -> None:
    cluster = cluster_of_two()
    cluster.cut([{"n1"}, {"n0", "n2"}])  # nothing tells that it is dead
    cluster.kill("n1")
    cluster.run(after_s)
    cluster.mend(is_lost=True)
    cluster.start(name)
    cluster.run(20.0)
    assert cluster.running() == {"n0": 1, name: 1}


def test_a_rank_whose_holder_lives_is_refused() -> None:
    cluster = cluster_of_two()
    newcomer = cluster.start("n2")
    cluster.run(3.0)
    assert newcomer.finish is not None and newcomer.finish.outcome is Outcome.GIVEN_UP
    assert "node rank 1 is taken by host 'n1'; this is 'n2'" in newcomer.finish.because
    assert cluster.running() == {"n0": 0, "n1": 0}
