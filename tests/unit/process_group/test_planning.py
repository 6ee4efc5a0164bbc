"""Which program serves a call, and which layout of ranks on hosts it may count on."""

from __future__ import annotations

import ast
import inspect
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rallypoint.base.errors import InvalidArgumentError, InvalidTypeError
from rallypoint.engine.communicator import Communicator, ReduceOp
from rallypoint.process_group import planning
from rallypoint.process_group.planning import AlgorithmOptions, Algorithms, ranks_per_host
from rallypoint.schedule.catalogue import ALGORITHMS, build
from rallypoint.schedule.choose import UNEVEN
from rallypoint.schedule.cost.links import read_model_text
from rallypoint.schedule.program import Collective, ProgramError
from tests.unit.engine import ranks as engine_ranks

ENGINE = Path(__file__).parents[3] / "native/engine"
NAMES = {name for algorithms in ALGORITHMS.values() for name in algorithms}


def test_ranks_per_host() -> None:
    assert ranks_per_host([0, 0, 0]) == 0
    assert ranks_per_host([0, 0, 1, 1]) == 2
    assert ranks_per_host([0, 0, 1]) == 2
    assert ranks_per_host([0, 1, 1]) == 1
    assert ranks_per_host([0, 1, 0, 1]) == 1
    assert ranks_per_host([0, 1, 2]) == 1


@pytest.mark.parametrize("model", ["", "ethernet_100g"])
def test_all_sizes_of_a_class_have_one_program(model: str) -> None:
    """The engine keeps the first program of a class, whichever size it was planned for."""
    text = read_model_text(model) if model else ""
    for ranks, per_host in ((4, 2), (4, 1), (4, 0), *([] if model else [(20, 4)])):
        plan = Algorithms(AlgorithmOptions(model_text=text)).planner(0, ranks, per_host)
        for collective in Collective:
            if collective is Collective.SEND:
                continue
            for exponent in range(1, 27, 5 if model else 1):
                sizes = {(1 << exponent) + 1, 3 << exponent >> 1, 2 << exponent}
                programs = {plan(collective, 0, size, False) for size in sizes}
                assert len(programs) == 1, (collective, ranks, per_host, exponent)


def test_bits_do_not_depend_on_earlier_calls() -> None:
    """Between 8 and 16 KiB two hosts of two ranks add up in one order, whichever came first."""

    def main(sizes: tuple[int, ...], communicator: Communicator) -> dict[int, bytes]:
        results = {}
        for size in sizes:
            mine = np.random.default_rng(communicator.rank).standard_normal(size // 4, np.float32)
            total = np.empty_like(mine)
            assert communicator.run(Collective.REDUCE, ReduceOp.SUM, 0, mine, total) == 0
            results[size] = total.tobytes()
        return results

    found = [
        engine_ranks.run_ranks(4, partial(main, sizes), transport="two hosts", per_host=2)[0]
        for sizes in ((10_000, 16_384), (16_384, 10_000))
    ]
    assert found[0] == found[1]


def test_blocks_of_different_lengths_have_a_program_of_their_own() -> None:
    plan = Algorithms(AlgorithmOptions("bruck")).planner(0, 4)
    even = plan(Collective.ALL_GATHER, 0, 64, False)
    assert plan(Collective.ALL_GATHER, 0, 0, True) != even
    direct = Algorithms(AlgorithmOptions(UNEVEN)).planner(0, 4)
    assert plan(Collective.ALL_GATHER, 0, 0, True) == direct(Collective.ALL_GATHER, 0, 64, False)


def test_neither_planning_nor_the_engine_names_an_algorithm() -> None:
    tree = ast.parse(inspect.getsource(planning))
    texts = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
    assert not texts & NAMES
    sources = [path for path in ENGINE.rglob("*") if path.suffix in (".cc", ".h")]
    assert len(sources) > 50
    for path in sources:
        literals = set(re.findall(r'"([^"\n]*)"', path.read_text()))
        assert not literals & NAMES, path


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_an_algorithm_of_the_group_that_does_not_support_so_many_ranks_is_not_used(
    ranks: int,
) -> None:
    """RALLYPOINT_ALGORITHM=two_level where the ranks do not fill their hosts."""
    asked = Algorithms(AlgorithmOptions("two_level"))
    usual = Algorithms(AlgorithmOptions())
    replaced = set()
    for collective in Collective:
        if "two_level" not in ALGORITHMS[collective] or collective.has_root:
            continue
        found = asked.planner(1, ranks, 2)(collective, 0, 1 << 20, False)
        try:
            build(collective, "two_level", ranks=ranks, per_node=2)
        except ProgramError:
            assert found == usual.planner(1, ranks, 2)(collective, 0, 1 << 20, False)
            replaced.add(collective)
    assert {Collective.ALL_REDUCE, Collective.ALL_GATHER} <= replaced


def test_a_group_uses_so_many_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_MOST_VARIANTS", 3)
    algorithms = Algorithms(AlgorithmOptions())
    found = [algorithms.variant(name) for name in ("ring", "double_tree", "ring", None)]
    assert found[0] == found[2] != found[1]
    assert found[3] == 0
    with pytest.raises(InvalidArgumentError, match="a group can use at most 3 algorithms"):
        algorithms.variant("direct_two_shot")
    with pytest.raises(InvalidArgumentError, match="algorithm is empty; name one, or pass None"):
        algorithms.variant("")
    with pytest.raises(InvalidTypeError, match="a name or the name of a file, not 7"):
        algorithms.variant(7)  # type: ignore[arg-type]
