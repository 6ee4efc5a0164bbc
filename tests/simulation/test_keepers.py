"""Simulated clusters whose agreements etcd or a store keeps: they hold, and each rule is needed."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest
from tests.simulation import sim_keeper
from tests.simulation.known_seeds import is_needed
from tests.simulation.sim_cluster import SimCluster
from tests.simulation.sim_keeper import SimEtcd, SimKeeper, SimServer, SimStore
from tests.simulation.sim_story import story

from rallypoint.rendezvous.consensus.messages import Agreement, Promise
from rallypoint.rendezvous.consensus.rules import KEEPER
from rallypoint.rendezvous.job.reports import Finish, Outcome
from rallypoint.rendezvous.keyvalue.keeper import JobKeys, Transact
from rallypoint.rendezvous.keyvalue.key_value_register import KeyValueRules
from rallypoint.rendezvous.keyvalue.key_value_voter import Answer, KeyValueVoter
from rallypoint.rendezvous.keyvalue.store_client import OneValue

SEEDS = range(200)
MANY_SEEDS = range(3000)
SIZE = 12
NEVER = float("-inf")


@pytest.fixture(params=[SimEtcd, SimStore])
def keeper(request: pytest.FixtureRequest) -> type[SimKeeper]:
    kind: type[SimKeeper] = request.param
    return kind


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("seeds", [SEEDS[i : i + 50] for i in range(0, len(SEEDS), 50)], ids=str)
def test_stories_hold(seeds: range, keeper: type[SimKeeper]) -> None:
    for seed in seeds:
        story(seed, max_size=SIZE, keeper=keeper)


def test_a_story_of_many_nodes(keeper: type[SimKeeper]) -> None:
    story(1, max_size=400, keeper=keeper, faults_s=10.0)


# Without one of the rules, the same stories end badly.


class NobodyWaits(KeyValueRules):
    """A candidate takes over from a coordinator that the keeper still hears."""

    def must_wait_s(self, leader: str, held: Agreement | None, lost: Collection[str]) -> float:
        return 0.0


class AllAreHeirs(KeyValueRules):
    """Who is no member takes over as soon as a member may."""

    def must_wait_s(self, leader: str, held: Agreement | None, lost: Collection[str]) -> float:
        return super().must_wait_s(leader, None, lost)


class WaitTooLittle(KeyValueRules):
    """A candidate waits for less than the coordinator's members may run."""

    def must_wait_s(self, leader: str, held: Agreement | None, lost: Collection[str]) -> float:
        return 0.7 * super().must_wait_s(leader, held, lost)


class NoEndOfOutage(KeyValueRules):
    """A coordinator goes on without the keeper for as long as its members hear it."""

    def newest_word(
        self, held: Agreement, pending: Agreement | None, heard: Mapping[str, float]
    ) -> float:
        members = held.members if pending is None else held.members + pending.members
        by_all = min([heard.get(each.key, NEVER) for each in members], default=NEVER)
        return max(heard.get(KEEPER, NEVER), by_all)


class OneMemberIsEnough(KeyValueRules):
    """A coordinator goes on without the keeper, though a member may have taken over."""

    def newest_word(
        self, held: Agreement, pending: Agreement | None, heard: Mapping[str, float]
    ) -> float:
        word = super().newest_word(held, pending, heard)
        return max([word, *[heard.get(each.key, NEVER) for each in held.members]])


class SaysNothingOfHaste(KeyValueVoter):
    """Who took over because a connection closed does not wait for the workers of the others."""

    def take(self) -> list[Answer]:
        return [
            answer.__replace__(was_lost=False) if isinstance(answer, Promise) else answer
            for answer in super().take()
        ]


@pytest.mark.long
@pytest.mark.parametrize(
    "rules", [NobodyWaits, AllAreHeirs, WaitTooLittle, NoEndOfOutage, OneMemberIsEnough]
)
def test_each_rule_is_needed(rules: type[KeyValueRules], keeper: type[SimKeeper]) -> None:
    assert is_needed(
        f"{rules.__name__} {keeper.__name__}",
        MANY_SEEDS,
        lambda seed: story(seed, max_size=SIZE, rules=rules, keeper=keeper),
        lambda seed: story(seed, max_size=SIZE, keeper=keeper),
    )


@pytest.mark.long
def test_the_haste_of_a_take_over_must_be_told(
    keeper: type[SimKeeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(seed: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sim_keeper, "KeyValueVoter", SaysNothingOfHaste)
            story(seed, max_size=SIZE, keeper=keeper)

    assert is_needed(
        f"SaysNothingOfHaste {keeper.__name__}",
        MANY_SEEDS,
        without,
        lambda seed: story(seed, max_size=SIZE, keeper=keeper),
    )


# Single stories.


def cluster_of(keeper: type[SimKeeper], nodes: int) -> SimCluster:
    cluster = SimCluster(seed=0, nodes=nodes, min_nodes=1, max_nodes=nodes, keeper=keeper)
    cluster.start_all()
    cluster.run(5.0)
    assert len(cluster.running()) == nodes
    return cluster


def test_a_job_runs_on_while_the_keeper_is_away_and_stops_when_it_stays_away(
    keeper: type[SimKeeper],
) -> None:
    cluster = cluster_of(keeper, 3)
    assert cluster.keeper is not None
    cluster.keeper.is_away = True
    cluster.run(25.0)
    assert set(cluster.running().values()) == {0}
    cluster.run(30.0)
    assert cluster.running() == {}
    cluster.keeper.is_away = False
    cluster.run(20.0)
    assert len(cluster.running()) == 3
    cluster.check_running()


def test_a_job_outlives_the_loss_of_all_that_is_kept(keeper: type[SimKeeper]) -> None:
    cluster = cluster_of(keeper, 3)
    assert cluster.keeper is not None
    cluster.keeper.forget()
    cluster.run(5.0)
    assert set(cluster.running().values()) == {0}
    cluster.kill("n1")
    cluster.run(5.0)
    assert cluster.running().keys() == {"n0", "n2"}


def test_of_two_either_may_die(keeper: type[SimKeeper]) -> None:
    for dead, left in (("n0", "n1"), ("n1", "n0")):
        cluster = cluster_of(keeper, 2)
        cluster.kill(dead)
        cluster.run(2.0)
        assert cluster.running() == {left: 1}


def test_who_takes_over_before_the_first_round_goes_on_gathering(keeper: type[SimKeeper]) -> None:
    cluster = SimCluster(seed=0, nodes=3, min_nodes=2, max_nodes=3, keeper=keeper)
    cluster.start("n0")
    cluster.run(0.5)  # it coordinates, and is the only one who was agreed on
    cluster.start("n1")
    cluster.run(0.5)
    cluster.kill("n0")
    cluster.run(1.0)
    cluster.start("n2")
    cluster.run(10.0)
    assert cluster.running().keys() == {"n1", "n2"}


def test_closing_the_name_ends_the_job_for_all(keeper: type[SimKeeper]) -> None:
    cluster = cluster_of(keeper, 3)
    kept, closed = cluster.keeper, JobKeys("job", 0).closed
    assert isinstance(kept, SimServer)
    request = Transact(revisions={closed: 0}, puts={closed: b"somebody closed it"})
    steps, result = kept.steps_of(OneValue(), request), None
    while not isinstance(result, int):
        try:
            result = kept.apply(steps.send(result))
        except StopIteration as end:
            result = end.value
    cluster.run(3.0)
    assert cluster.running() == {}
    ends = {agent.finish for agent in cluster.agents.values()}
    assert ends == {Finish(outcome=Outcome.STOPPED, because="somebody closed it")}


def test_when_all_have_died_a_newcomer_goes_on_with_the_next_round(keeper: type[SimKeeper]) -> None:
    cluster = cluster_of(keeper, 2)
    cluster.kill("n0")
    cluster.kill("n1")
    cluster.start("n0")
    cluster.run(25.0)
    assert cluster.running() == {}  # for what it knows, the others may run without the keeper
    cluster.run(30.0)
    assert cluster.running() == {"n0": 1}
