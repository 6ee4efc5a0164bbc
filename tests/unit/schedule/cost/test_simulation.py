"""Simulated times: three methods that agree, NCCL's published formulas, noise and failures."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest

from rallypoint.base.errors import InvalidArgumentError
from rallypoint.schedule.catalogue import ALGORITHMS, build
from rallypoint.schedule.cost.links import Level, Links, read_model
from rallypoint.schedule.cost.simulation import Simulation, ring_time_us
from rallypoint.schedule.cost.simulation.prices import Pieces, cut
from rallypoint.schedule.cost.simulation.walk import walk
from rallypoint.schedule.cost.simulation.wave import Conditions, Graph
from rallypoint.schedule.program import SLOTS, Collective, Incoming, Program, ProgramError, Send

pytestmark = pytest.mark.slow

CASES = [(c, name) for c in Collective if c is not Collective.SEND for name in ALGORITHMS[c]]


def some_links(chance: random.Random, per_node: int, **changes: object) -> Links:
    near = Level("node", 0, chance.random(), chance.random(), chance.uniform(1, 10))
    far = Level("network", math.inf, chance.uniform(0, 5), chance.random(), chance.uniform(1, 5))
    links = Links(
        "random",
        (near, far),
        reduce_gb_per_s=5,
        slots=chance.choice([1, 2, 8]),
        block_bytes=1000,
        multicast=chance.random() < 0.5,
    )
    return links.on(per_node)


@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_all_ranks_at_once_are_timed_as_one_by_one(
    collective: Collective, name: str, seed: int
) -> None:
    chance = random.Random(seed)
    for ranks in (1, 2, 3, 5, 8, 12):
        per_node = chance.choice([each for each in (1, 2, 4) if ranks % each == 0])
        program = build(collective, name, ranks=ranks, per_node=per_node)
        links = some_links(chance, per_node)
        if name == "direct_two_shot":  # the one that may need more than one slot
            links = replace(links, slots=max(links.slots, SLOTS))
        for nbytes in (0, 5_000, 60_000):
            pieces = cut(program, nbytes, links)
            one_by_one = walk(program, pieces, links)
            assert Graph(program, links).run(pieces) == pytest.approx(one_by_one)


@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_ranks_a_period_apart_do_the_same(collective: Collective, name: str) -> None:
    for ranks, per_node in ((2, 1), (3, 1), (7, 1), (8, 2), (12, 3)):
        program = build(collective, name, ranks=ranks, per_node=per_node)
        if not program.period:
            continue
        for rank in range(ranks):
            assert shape(program, rank) == shape(program, rank % program.period)
        links = some_links(random.Random(ranks), per_node)
        period = math.lcm(program.period, per_node)
        pieces = cut(program, 4_000, links)
        everyone = walk(program, pieces, links)
        folded = walk(program, pieces, links, period=period)
        assert everyone == pytest.approx(folded * (ranks // period))


def shape(program: Program, rank: int) -> list[list[tuple[object, ...]]]:
    """What a rank does, with peers as distances, and chunks left out but for their number."""

    def distance(peer: int) -> int:
        return (peer - rank) % program.ranks

    return [
        [
            (each.source.count, *(distance(to) for to in each.to))
            if isinstance(each, Send)
            else tuple(
                sorted(distance(o.peer) if isinstance(o, Incoming) else -1 for o in each.operands)
            )
            for each in lane
        ]
        for lane in program.lanes(rank)
    ]


@pytest.mark.long
@pytest.mark.parametrize("per_node", [1, 6])
@pytest.mark.parametrize("name", ["ring", "node_ring"])
def test_formula_and_folding_agree_up_to_1024_ranks(name: str, per_node: int) -> None:
    found = 0
    # All that are below 128 and some beyond; RALLYPOINT_TEST_ALL_RANKS=1: all, in a minute.
    stride = 1 if os.environ.get("RALLYPOINT_TEST_ALL_RANKS") else 73
    below = range(per_node, 128, per_node)
    every = [*below, *range(below[-1] + per_node, 1025, per_node * stride)]
    for ranks in every:
        links = Links(
            "links",
            (Level("node", 0, 0.7, 0.1, 9.0), Level("network", math.inf, 3.1, 0.1, 9.0)),
            reduce_gb_per_s=20.0,
        ).on(per_node)
        program = build(Collective.ALL_REDUCE, name, ranks=ranks, per_node=per_node)
        pieces = Pieces(1, 1000 * (ranks % 5))
        formula = ring_time_us(program, pieces, links)
        if formula is not None:
            found += 1
            folded = walk(program, pieces, links, period=max(program.period, per_node))
            assert formula == pytest.approx(max(folded)), ranks
    assert found >= len(every) - 2


def test_formula_is_not_given_where_queues_build_up() -> None:
    """A slow port behind fast links: chunks wait for each other, and the sum is too small."""
    links = Links("x", (Level("node", 2, 0.1, 0.1), Level("network", math.inf, 1.0, 9.0)))
    program = build(Collective.ALL_REDUCE, "ring", ranks=8)
    assert ring_time_us(program, Pieces(1, 0.0), links) is None


@pytest.mark.long
@pytest.mark.parametrize("nodes", [2, 4, 64, 512])
@pytest.mark.parametrize(
    ("variant", "ring", "tree"),
    [  # base, inside a node, across: NCCL v2.5.6, src/graph/tuning.cc, Volta
        ("LL", (3.6, 0.9, 0.9), (4.4, 0.5, 5.0)),
        ("LL128", (3.6, 2.5, 2.5), (4.4, 1.9, 7.5)),
        ("Simple", (8.4, 6.6, 6.6), (0.0, 28.0, 50.0)),
    ],
)
def test_nccl_formulas(
    variant: str, nodes: int, ring: tuple[float, ...], tree: tuple[float, ...]
) -> None:
    """Latency of all_reduce as NCCL's tuner has it; nothing in the simulator knows of NCCL."""
    model, ranks = read_model("summit"), 6 * nodes

    def simulated(name: str) -> float:
        program = build(Collective.ALL_REDUCE, name, ranks=ranks, per_node=6)
        return Simulation(program, model.links(variant, name).on(6)).run(0).time_us

    base, inside, _ = ring
    assert simulated("ring") == pytest.approx(base + 2 * (ranks - 1) * inside)
    base, inside, across = tree
    wanted = base + 2 * (5 * inside + math.log2(nodes) * across)
    assert simulated("double_tree") == pytest.approx(wanted, rel=1e-12)


@pytest.mark.long
def test_24576_ranks() -> None:
    """Six on each of 4,096 nodes, as on Summit: 0 bytes by NCCL's formulas, and 256 MiB."""
    model, times = read_model("summit"), {}
    tree: Simulation | None = None
    for variant in model.variants:
        program = build(Collective.ALL_REDUCE, "ring", ranks=24_576, per_node=6)
        ring = Simulation(program, model.links(variant, "ring").on(6))
        program = build(Collective.ALL_REDUCE, "double_tree", ranks=24_576, per_node=6)
        tree = Simulation(program, model.links(variant, "double_tree").on(6), twin=tree)
        assert (ring.steps, tree.steps) == (49_150, 34)
        times[variant] = (ring.run(0).time_us, tree.run(0).time_us)
    assert times["LL"] == pytest.approx((44_238.6, 129.4))
    assert times["LL128"] == pytest.approx((122_878.6, 203.4))
    assert times["Simple"] == pytest.approx((324_398.4, 1480.0))


@pytest.mark.parametrize(("variant", "ring"), [("LL", (6.6, 1.0, 2.7)), ("Simple", (8.4, 3.4, 14))])
def test_nccl_formula_of_newer_rings(variant: str, ring: tuple[float, float, float]) -> None:
    """NCCL v2.30 tells hops inside nodes from hops across: 2 (N - 1) of the latter."""
    base, inside, across = ring
    for nodes in (2, 3, 16, 100):
        ranks = 8 * nodes
        program = build(Collective.ALL_REDUCE, "node_ring", ranks=ranks, per_node=8)
        links = read_model("hopper").links(variant, "node_ring").on(8)
        hops_across = 2 * (nodes - 1)
        wanted = base + (2 * (ranks - 1) - hops_across) * inside + hops_across * across
        assert Simulation(program, links).run(0).time_us == pytest.approx(wanted)


def test_steady_state_is_carried_on_exactly() -> None:
    links = some_links(random.Random(3), 1)
    for name in ("binary_tree", "double_tree", "ring"):
        program = build(Collective.ALL_REDUCE, name, ranks=13)
        pieces = Pieces(400, 700.0)
        assert Graph(program, links).run(pieces) == pytest.approx(walk(program, pieces, links))


def test_steps_and_bytes() -> None:
    links = Links("x", (Level("all", math.inf, 1.0),))

    def outcome(name: str, ranks: int) -> object:
        result = Simulation(build(Collective.ALL_REDUCE, name, ranks=ranks), links).run(1200)
        return result.steps, result.busiest_link_bytes

    assert outcome("ring", 12) == (22, pytest.approx(2200))
    assert outcome("ring", 2400) == (4798, pytest.approx(2 * 2399 / 2400 * 1200))
    assert outcome("direct_one_shot", 12) == (1, 1200)
    assert outcome("direct_two_shot", 12) == (2, pytest.approx(200))
    assert outcome("double_tree", 16) == (8, pytest.approx(1200))
    assert outcome("halving_doubling", 16) == (8, pytest.approx(1200))


def test_what_is_shared_bounds_the_time() -> None:
    """Sixteen ranks on a node share a port of 1 GB/s for all that they send across."""
    levels = (Level("node", 0, 0.1), Level("network", math.inf, 1.0))
    links = Links("x", levels, nic_gb_per_s=1.0).on(16)
    program = build(Collective.ALL_TO_ALL, "direct", ranks=32)
    outcome = Simulation(program, links).run(32 * 1000)
    assert outcome.bound == "network port"
    assert outcome.time_us == pytest.approx(16 * 16 * 1000 / 1e3)


def test_noise_has_a_seed_and_only_delays() -> None:
    links = some_links(random.Random(1), 1)
    simulation = Simulation(build(Collective.ALL_REDUCE, "double_tree", ranks=32), links)
    calm = simulation.run(100_000).time_us
    times = [simulation.run(100_000, Conditions(noise=0.5, seed=seed)).time_us for seed in range(9)]
    again = simulation.run(100_000, Conditions(noise=0.5, seed=4)).time_us
    assert again == times[4]
    assert len(set(times)) == 9
    assert min(times) > calm


def test_straggler_and_failed_link() -> None:
    links = Links("x", (Level("all", math.inf, 1.0),))
    simulation = Simulation(build(Collective.ALL_REDUCE, "ring", ranks=8), links)
    calm = simulation.run(0).time_us
    assert simulation.run(0, Conditions(late_us=((3, 100.0),))).time_us == pytest.approx(calm + 100)
    failed = Conditions(failed=((2, 3),), retry_us=50.0)
    assert simulation.run(0, failed).time_us == pytest.approx(calm + 2 * 50)
    unaffected = Conditions(failed=((0, 4),), retry_us=50.0)
    assert simulation.run(0, unaffected).time_us == calm
    assert math.isinf(simulation.run(0, Conditions(failed=((2, 3),), retry_us=math.inf)).time_us)


def test_too_large_to_simulate_is_said() -> None:
    program = build(Collective.ALL_REDUCE, "direct_two_shot", ranks=24_576)
    links = read_model("summit").links("LL", "direct_two_shot")
    with pytest.raises(InvalidArgumentError, match="too many to simulate"):
        Simulation(program, links)


def test_deadlock_is_found() -> None:
    program = build(Collective.ALL_REDUCE, "ring", ranks=3)
    backwards = Program(
        "broken",
        program.collective,
        3,
        chunks=3,
        sends=4,
        lanes=lambda rank: tuple(lane[::-1] for lane in program.lanes(rank)),
    )
    links = Links("x", (Level("all", math.inf, 1.0),))
    with pytest.raises(ProgramError, match="wait for each other"):
        walk(backwards, Pieces(1, 0.0), links)


def test_models_of_the_package_can_be_read() -> None:
    from rallypoint.schedule.cost.links import known_models, parse_model

    assert "volta_summit" in known_models()
    for name in known_models():
        model = read_model(name)
        assert model.name == name
        for variant in model.variants:
            for algorithm in ("ring", "double_tree"):
                assert model.links(variant, algorithm).levels
    with pytest.raises(InvalidArgumentError, match=r"ethernet_100g, ethernet_10g.*all match"):
        read_model("ethernet")
    with pytest.raises(InvalidArgumentError, match="there is no link model 'nothing'"):
        read_model("nothing")
    with pytest.raises(InvalidArgumentError, match="not a link model"):
        parse_model("name = 'x'")
