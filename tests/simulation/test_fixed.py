"""Stories of nodes that are known from the start: they hold, and each rule is needed for it."""

from __future__ import annotations

import pytest
from tests.simulation.sim_fixed import TIMEOUTS, FixedCluster, fixed_story
from tests.simulation.sim_network import Process
from tests.simulation.sim_witness import ViolationError

from rallypoint.rendezvous.consensus.messages import Heartbeat, Message
from rallypoint.rendezvous.consensus.rules import FixedRules, Rules
from rallypoint.rendezvous.job.reports import Outcome
from rallypoint.rendezvous.job.round import Endpoint

SEEDS = range(500)
HOUR_S = 3600.0


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("seeds", [SEEDS[i : i + 100] for i in SEEDS[::100]], ids=str)
def test_stories_hold(seeds: range) -> None:
    for seed in seeds:
        fixed_story(seed)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        {"quorum": "members"},  # somebody else may go on without node 0
        {"is_fixed": False},  # a node that is started again takes the place of its old self
        {"breaks_after_s": None},  # a connection that breaks is no end
    ],
    ids=str,
)
def test_each_rule_is_needed(change: dict[str, object]) -> None:
    with pytest.raises(ViolationError):
        for seed in SEEDS:
            fixed_story(seed, **change)


# Stopped launchers.


class Leased(FixedRules):
    """Workers end when their node's lease runs out."""

    needs_lease = Rules.needs_lease
    must_fence = Rules.must_fence

    def lease_s(self, now: float, quorum_heard_at: float) -> float:
        return 5.0


class Talkative(FixedRules):
    """A member sends heartbeats as often as ever while node 0 does not answer."""

    heartbeat_after_s = Rules.heartbeat_after_s


class Patient(FixedRules):
    """Node 0 does not end before the others have."""

    tell_end_for_s = Rules.tell_end_for_s


def cluster_of(nodes: int, **changes: object) -> FixedCluster:
    """One whose round runs."""
    cluster = FixedCluster(seed=0, nodes=nodes, **changes)  # type: ignore[arg-type]
    cluster.start_all()
    cluster.run(5.0)
    assert cluster.running() == dict.fromkeys(cluster.names, 0)
    return cluster


def outlives_an_hour(stopped: str, **changes: object) -> bool:
    """Whether the round runs on while an agent is stopped for an hour, and after it."""
    cluster = cluster_of(3, **changes)
    running = cluster.running()
    cluster.agents[stopped].stop()
    cluster.run(HOUR_S)
    runs = cluster.running() == running
    cluster.agents[stopped].go_on()
    cluster.run(10.0)
    return runs and cluster.running() == running


@pytest.mark.parametrize("stopped", ["n0", "n1"])
def test_a_stopped_agent_ends_nothing(stopped: str) -> None:
    assert outlives_an_hour(stopped)


@pytest.mark.parametrize("stopped", ["n0", "n1"])
def test_or_it_would_for_silence(stopped: str) -> None:
    assert not outlives_an_hour(stopped, timeouts=TIMEOUTS.__replace__(missed_heartbeats=4.0))


def test_or_it_would_for_a_lease() -> None:
    assert not outlives_an_hour("n0", rules=Leased)


def unread_beats(monkeypatch: pytest.MonkeyPatch, **changes: object) -> int:
    """How many a node 0 that is stopped for an hour finds."""
    cluster = cluster_of(2, **changes)
    send, sent = cluster.network.send, 0

    def count(sender: Process, to: str, at: Endpoint | None, message: Message) -> None:
        nonlocal sent
        sent += isinstance(message, Heartbeat)
        send(sender, to, at, message)

    monkeypatch.setattr(cluster.network, "send", count)
    cluster.agents["n0"].stop()
    cluster.run(HOUR_S)
    unread, sent = sent, 0
    cluster.agents["n0"].go_on()
    cluster.run(20.0)
    assert sent > 10  # as often as before
    return unread


def test_a_stopped_node_0_is_not_sent_more_than_its_kernel_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert unread_beats(monkeypatch) < 50
    assert unread_beats(monkeypatch, rules=Talkative) > 4000


@pytest.mark.parametrize("rules", [FixedRules, Patient])
def test_a_stopped_node_learns_later_how_the_job_ended(rules: type[FixedRules]) -> None:
    cluster = cluster_of(2, rules=rules)
    n0, n1 = (cluster.agents[name] for name in cluster.names)
    n1.succeed()
    cluster.run(1.0)
    n1.stop()
    n0.succeed()
    cluster.run(10.0)
    assert n0.is_alive == (rules is Patient)
    n1.go_on()
    cluster.run(1.0)
    assert n1.finish is not None
    assert n1.finish.outcome is Outcome.SUCCEEDED


def test_only_those_of_the_first_round_are_in_the_others() -> None:
    cluster = cluster_of(3, max_restarts=1000)
    cluster.agents["n2"].fail()
    cluster.run(2.0)
    assert cluster.running() == dict.fromkeys(cluster.names, 1)
    cluster.kill("n2")
    cluster.start("n2")
    cluster.run(5.0)
    assert cluster.running() == {}
    cluster.check_over()
