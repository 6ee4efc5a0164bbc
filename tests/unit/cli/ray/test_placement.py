"""Which nodes of a Ray cluster get an agent, as stories without Ray."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.cli.flags import RunOptions
from rallypoint.cli.options import UsageError
from rallypoint.cli.ray.placement import (
    REST_S,
    TRIES,
    AgentRequest,
    Need,
    RayAgent,
    RayFacts,
    RayNode,
    read_need,
    requests,
    shortage,
)

ONE_CPU = Need(1, 1, 0)


def node(name: str, cpus: float = 2) -> RayNode:
    return RayNode(name, f"10.0.0.{name}", {"CPU": cpus})


def facts(names: str, bundles: Mapping[int, str]) -> RayFacts:
    return RayFacts([node(name) for name in names], bundles)


def started(
    facts: RayFacts, agents: list[RayAgent], most: int = 3, now: float = 0.0
) -> list[tuple[str, int | None]]:
    found = requests(facts, agents, ONE_CPU, most=most, now=now)
    return [(request.node.node_id, request.bundle) for request in found]


def test_nothing_starts_before_the_fewest_are_there() -> None:
    assert started(facts("12", {}), []) == []
    assert started(facts("12", {0: "", 1: "", 2: ""}), []) == []


def test_the_fewest_and_more_at_once() -> None:
    assert started(facts("123", {0: "2", 1: "1"}), []) == [("2", 0), ("1", 1), ("3", None)]
    assert started(facts("123", {0: "2", 1: "1"}), [], most=2) == [("2", 0), ("1", 1)]


def test_a_new_node_is_used_if_it_fits() -> None:
    agents = [RayAgent("1", 0), RayAgent("2", 1)]
    assert started(facts("12", {0: "1", 1: "2"}), agents) == []
    assert started(facts("123", {0: "1", 1: "2"}), agents) == [("3", None)]
    small = RayFacts([node("1"), node("2"), node("3", 0.5)], {0: "1", 1: "2"})
    assert requests(small, agents, ONE_CPU, most=3, now=0.0) == []


def test_a_free_node_is_left_for_the_bundle_of_a_lost_one() -> None:
    agents = [RayAgent("1", 0), RayAgent("2", 1, ended_at=0.0)]
    assert started(facts("124", {0: "1", 1: "2"}), agents) == []  # Ray does not know yet
    assert started(facts("14", {0: "1", 1: ""}), agents) == []
    assert started(facts("14", {0: "1", 1: "4"}), agents) == [("4", 1)]


def test_a_node_beyond_the_fewest_is_replaced_at_once() -> None:
    agents = [RayAgent("1", 0), RayAgent("2", 1), RayAgent("3", None, ended_at=0.0)]
    assert started(facts("1234", {0: "1", 1: "2"}), agents) == [("4", None)]
    assert started(facts("123", {0: "1", 1: "2"}), agents) == []


def test_a_node_where_one_was_lost_is_used_again_later() -> None:
    agents = [RayAgent("1", 0), RayAgent("2", 1, ended_at=0.0)]
    both = facts("12", {0: "1", 1: "2"})
    assert started(both, agents, now=REST_S - 0.1) == []
    assert started(both, agents, now=REST_S) == [("2", 1)]
    often = [RayAgent("1", 0), *[RayAgent("2", 1, ended_at=0.0)] * TRIES]
    assert started(both, often, now=10 * REST_S) == []


def test_a_node_where_none_can_start_is_left_alone() -> None:
    agents = [RayAgent("1", 0), RayAgent("2", 1, ended_at=0.0, is_hopeless=True)]
    assert started(facts("123", {0: "1", 1: "2"}), agents, now=100.0) == [("3", None)]


def test_a_bundle_on_a_node_that_has_an_agent_starts_none() -> None:
    agents = [RayAgent("1", 0), RayAgent("2", 1, ended_at=0.0), RayAgent("3", None)]
    assert started(facts("134", {0: "1", 1: "3"}), agents) == [("4", None)]


NAMES = "123456"
AGENTS = st.builds(
    RayAgent,
    st.sampled_from(NAMES),
    st.none() | st.integers(0, 2),
    st.none() | st.floats(0, 50),
    st.booleans(),
)


@given(
    st.sets(st.sampled_from(NAMES)),
    st.dictionaries(st.integers(0, 2), st.sampled_from([*NAMES, ""])),
    st.lists(AGENTS, max_size=6),
    st.integers(1, 6),
)
def test_never_two_on_a_node_nor_more_than_the_most(
    names: set[str], bundles: dict[int, str], agents: list[RayAgent], most: int
) -> None:
    seen = facts("".join(sorted(names)), bundles)
    found: list[AgentRequest] = requests(seen, agents, ONE_CPU, most=most, now=60.0)
    living = [agent.node_id for agent in agents if agent.ended_at is None]
    wanted = [request.node.node_id for request in found]
    assert not set(wanted) & set(living)
    assert set(wanted) <= names
    if len(set(bundles.values())) == len(bundles):  # as Ray spreads them
        assert len(set(wanted)) == len(wanted)
    assert not found or len(living) + len(found) <= most


def test_what_is_missing() -> None:
    need = Need(8, 8, 4)
    big = RayNode("1", "10.0.0.1", {"CPU": 8, "GPU": 4})
    small = RayNode("2", "10.0.0.2", {"CPU": 8})

    def told(nodes: list[RayNode], agents: list[RayAgent], fewest: int = 2) -> str:
        return shortage(RayFacts(nodes, {}), agents, need, fewest=fewest, now=0.0)

    each = "each with 8 CPUs and 4 GPUs"
    assert told([], []) == f"waiting for 2 nodes, {each}; Ray has 0"
    assert told([big, small], []) == (
        f"waiting for 2 nodes, {each}; Ray has 1 (10.0.0.1); 1 with less (10.0.0.2)"
    )
    assert told([big], [], 1) == (
        "waiting for 1 node with 8 CPUs and 4 GPUs; Ray has 1 (10.0.0.1), but other jobs use them"
    )
    assert told([big], [RayAgent("1", 0)]) == (
        "waiting for 1 more node with 8 CPUs and 4 GPUs; Ray has 0"
    )
    assert told([big], [RayAgent("1", 0)], 1) == ""
    lost = [RayAgent("1", 0, ended_at=0.0)]
    assert shortage(RayFacts([big, node("3", 8)], {0: "1"}), lost, ONE_CPU, fewest=1, now=0.0) == (
        "waiting for 1 node with 1 CPU; Ray has 1 (10.0.0.3), and has not noticed the loss yet"
    )


CPUS = {"CPU": 8.0, "memory": 1e9}
GPUS = {"CPU": 32.0, "GPU": 4.0}


def need(*words: str, nodes: tuple[dict[str, float], ...] = (CPUS,)) -> Need:
    values = dict(word.split("=") for word in words)
    return read_need(RunOptions(values), nodes)


def test_workers_by_number() -> None:
    assert need() == Need(1, 1, 0)
    assert need("--nproc-per-node=4") == Need(4, 4, 0)
    assert need("--nproc-per-node=4", nodes=(CPUS, GPUS)) == Need(4, 4, 4)
    assert need("--nproc-per-node=4", "--gpus-per-node=0", nodes=(GPUS,)) == Need(4, 4, 0)
    assert need("--nproc-per-node=4", "--cpus-per-node=32", nodes=(GPUS,)) == Need(4, 32, 4)


def test_workers_by_what_the_smallest_node_has() -> None:
    larger = {"CPU": 64.0, "GPU": 8.0}
    assert need("--nproc-per-node=gpu", nodes=(CPUS, larger, GPUS)) == Need(4, 4, 4)
    assert need("--nproc-per-node=auto", nodes=(CPUS, larger, GPUS)) == Need(4, 4, 4)
    assert need("--nproc-per-node=auto", nodes=(CPUS, {"CPU": 16.0})) == Need(8, 8, 0)
    assert need("--nproc-per-node=cpu", nodes=(GPUS, {"memory": 1.0})) == Need(32, 32, 0)
    assert need("--nproc-per-node=gpu", "--gpus-per-node=2", nodes=()) == Need(2, 2, 2)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--nproc-per-node=gpu", "no node of this Ray cluster has GPUs now"),
        ("--nproc-per-node=0", "it must be 1 or more"),
        ("--nproc-per-node=some", "--nproc-per-node"),
    ],
)
def test_what_makes_no_sense(word: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        need(word)


def test_nodes_that_have_no_cpus_now() -> None:
    with pytest.raises(UsageError, match="no node of this Ray cluster has CPUs now; say how many"):
        need("--nproc-per-node=cpu", nodes=())


def test_what_fits() -> None:
    assert Need(4, 4, 4).fits(GPUS)
    assert not Need(4, 4, 4).fits(CPUS)
    assert Need(4, 0, 0).fits({})
    assert str(Need(1, 1, 2)) == "1 CPU and 2 GPUs"
