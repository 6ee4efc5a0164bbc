"""Workers that can go on are kept, paused, where no coordinator is heard, until there is one again.

The coordinator's host falls silent, for a short time or for good. Workers that the others went on
without are ended.
"""

from __future__ import annotations

import pytest
from tests.simulation.sim_cluster import SimCluster

from rallypoint.rendezvous.consensus.messages import Heartbeat, Message
from rallypoint.rendezvous.job.gathering import Gathering
from rallypoint.rendezvous.job.reports import Join

SEEDS = 8
SILENCE_S = 5.0  # by default, and one more until it counts as lost


def cluster_of(seed: int, nodes: int, *, keeps: bool = True, min_nodes: int = 2) -> SimCluster:
    """One round of all runs."""
    cluster = SimCluster(seed=seed, nodes=nodes, min_nodes=min_nodes, max_nodes=nodes)
    cluster.start_all()
    cluster.run(10 + cluster.random.random())
    for agent in cluster.alive():
        agent.keeps = keeps
    assert cluster.running() == dict.fromkeys(cluster.names, 0)
    return cluster


def told(cluster: SimCluster, what: str) -> set[str]:
    """The nodes of which the story says so."""
    lines = [line.split(maxsplit=2)[1:] for line in cluster.witness.lines]
    return {name.rstrip(":") for name, text in lines if text == what}


@pytest.mark.parametrize("nodes", [3, pytest.param(7, marks=pytest.mark.long)])
def test_a_silent_coordinator_costs_only_its_own_memory(nodes: int) -> None:
    for seed in range(SEEDS):
        cluster = cluster_of(seed, nodes)
        others = {*cluster.names} - {"n0"}
        cluster.cut([{"n0"}, others])
        cluster.run(3 * SILENCE_S)
        assert cluster.running() == dict.fromkeys(sorted(others), 1), f"seed {seed}"
        assert told(cluster, "round 0 kept") == set(cluster.names)
        cluster.mend()
        cluster.run(3 * SILENCE_S)
        assert set(cluster.running()) == set(cluster.names)
        assert told(cluster, "kept workers end") == {"n0"}, "the others went on without it"
        assert not told(cluster, "round 0 ended")


def test_a_short_silence_costs_nobody_anything() -> None:
    kept = 0
    for seed in range(SEEDS):
        cluster = cluster_of(seed, 3)
        cluster.cut([{"n0"}, {"n1", "n2"}])
        cluster.run(SILENCE_S + cluster.random.uniform(-0.5, 0.5))
        cluster.mend()
        cluster.run(3 * SILENCE_S)
        assert set(cluster.running()) == set(cluster.names)
        assert not told(cluster, "kept workers end"), f"seed {seed}"
        kept += bool(told(cluster, "round 0 kept"))
    assert 0 < kept < SEEDS, "some were heard again in time"


def test_where_nobody_can_go_on_all_end_as_before() -> None:
    for seed in range(SEEDS):
        cluster = cluster_of(seed, 3, keeps=False)
        cluster.cut([{"n0"}, {"n1", "n2"}])
        cluster.run(3 * SILENCE_S)
        assert cluster.running() == {"n1": 1, "n2": 1}
        assert told(cluster, "round 0 ended") == set(cluster.names)


@pytest.mark.parametrize("nodes", [3, pytest.param(5, marks=pytest.mark.long)])
def test_if_nobody_could_go_on_all_do_when_the_network_is_back(nodes: int) -> None:
    for seed in range(SEEDS):
        cluster = cluster_of(seed, nodes)
        cluster.cut([{name} for name in cluster.names])
        cluster.run(60)
        assert not cluster.running()
        cluster.mend()
        cluster.run(60)
        assert set(cluster.running()) == set(cluster.names), f"seed {seed}"
        assert told(cluster, "round 0 kept") == set(cluster.names)
        assert not told(cluster, "kept workers end"), f"seed {seed}"


@pytest.mark.parametrize("nodes", [5, pytest.param(9, marks=pytest.mark.long)])
def test_the_coordinator_is_lost_while_survivors_wait_for_a_node(nodes: int) -> None:
    """Whoever comes after it hears from all of them who goes on, and waits for each."""
    for seed in range(SEEDS):
        cluster = cluster_of(seed, nodes, min_nodes=nodes)
        others = cluster.names[1:-1]
        cluster.kill(cluster.names[-1])
        cluster.run(cluster.random.uniform(2.0, 20.0))
        assert not cluster.running(), "one is missing"
        cluster.kill("n0")
        cluster.run(cluster.random.uniform(0.0, 20.0))
        for name in (cluster.names[-1], "n0"):
            cluster.start_later(name, cluster.random.uniform(0.0, 2.0))
        cluster.run(40)
        assert set(cluster.running()) == set(cluster.names), f"seed {seed}"
        assert told(cluster, "round 0 kept") >= set(others)
        assert not told(cluster, "kept workers end") & set(others), f"seed {seed}"


def ends_of_a_slow_survivor(seed: int) -> set[str]:
    """Only n1 can go on, and its agent is stopped while a coordinator is lost, and others come."""
    cluster = cluster_of(seed, 7, min_nodes=6)
    for name, agent in cluster.agents.items():
        agent.keeps = name == "n1"
    for name in ("n5", "n6"):
        cluster.kill(name)
    cluster.run(10)
    assert not cluster.running(), "one is missing"
    cluster.agents["n1"].stop()
    cluster.kill("n0")
    for name in ("n5", "n6", "n0"):
        cluster.start_later(name, cluster.random.uniform(0.0, 0.2))
    cluster.run(SILENCE_S - cluster.random.uniform(0.2, 1.0))
    cluster.agents["n1"].go_on()
    cluster.run(40)
    assert "n1" in cluster.running()
    return told(cluster, "kept workers end")


def test_a_new_coordinator_waits_for_each_who_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(map(ends_of_a_slow_survivor, range(SEEDS)))
    monkeypatch.setattr(Gathering, "expect", lambda self, keys: None)
    assert any(map(ends_of_a_slow_survivor, range(SEEDS))), "it is needed"


def test_a_late_heartbeat_does_not_bring_back_who_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes after newer ones, over an older connection, in the very moment of the next round."""
    cluster = cluster_of(0, 3, min_nodes=3)
    leader, other = cluster.agents["n0"], cluster.agents["n1"]
    assert cluster.leaders() == ["n0"]
    cluster.kill("n2")
    heartbeats: list[Heartbeat] = []
    hear = leader.hear

    def listen(sender: str, message: Message) -> None:
        if isinstance(message, Heartbeat) and sender == other.key:
            heartbeats.append(message)
        elif isinstance(message, Join):
            hear(other.key, heartbeats[0])
        hear(sender, message)

    monkeypatch.setattr(leader, "hear", listen)
    cluster.run(3)
    del heartbeats[:-1]
    assert heartbeats[0].report.survivors == 2
    other.fail()
    cluster.run(3)
    assert heartbeats[-1].report.survivors == 1
    cluster.start("n2")
    cluster.run(5)
    assert set(cluster.running()) == {"n0", "n1", "n2"}
    assert not told(cluster, "a worker fails"), "the round has a place for one that has died"
