"""Random sizes, operators and widths: the interpreter, NumPy and the native engine agree."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.engine.ranks import run_ranks

from rallypoint.engine.communicator import Communicator, ReduceOp
from rallypoint.schedule.catalogue import ALGORITHMS, build
from rallypoint.schedule.program import Collective, Program, ProgramError, widen
from rallypoint.schedule.proof.interpret import interpret

CASES = [
    (collective, name)
    for collective in Collective
    if collective not in (Collective.SEND, Collective.BARRIER)
    for name in ALGORITHMS[collective]
]
OPERATORS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def chunked(program: Program, inputs: list[Any]) -> list[list[Any]]:
    """Each rank's blocks as a list of chunks, which may be of different lengths."""
    return [
        [chunk for block in blocks for chunk in np.array_split(block, program.chunks)]
        for blocks in inputs
    ]


def wanted(program: Program, inputs: list[Any], operator: Any, rank: int) -> list[Any]:
    """The output blocks of a rank, from the collective's definition."""
    blocks = []
    for block in range(program.output_blocks(rank)):
        sources = program.collective.sources(
            rank=rank, block=block, ranks=program.ranks, root=program.root
        )
        total = inputs[sources[0][0]][sources[0][1]]
        for peer, index in sources[1:]:
            total = operator(total, inputs[peer][index])
        blocks.append(total)
    return blocks


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_interpreter_and_numpy_agree(data: st.DataObject) -> None:
    collective, name = data.draw(st.sampled_from(CASES), "algorithm")
    ranks = data.draw(st.integers(1, 20), "ranks")
    root = data.draw(st.integers(0, ranks - 1), "root") if collective.has_root else 0
    per_node = data.draw(st.sampled_from([n for n in (1, 2, 3, 5) if ranks % n == 0]), "per node")
    operator = OPERATORS[data.draw(st.sampled_from(list(OPERATORS)), "operator")]
    program = build(collective, name, ranks=ranks, root=root, per_node=per_node)
    with suppress(ProgramError):  # of one that moves several blocks at once
        program = widen(program, data.draw(st.integers(1, 3), "ways"))
    length = data.draw(st.integers(0, 3 * program.chunks), "length")
    chance = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    inputs = [chance.integers(-9, 9, (program.input_blocks(rank), length)) for rank in range(ranks)]
    outputs = interpret(program, chunked(program, inputs), operator)
    for rank, chunks in enumerate(outputs):
        expected = wanted(program, inputs, operator, rank)
        got = np.concatenate(chunks) if chunks else np.empty(0)
        np.testing.assert_array_equal(got, np.concatenate(expected) if expected else [])


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_engine_has_the_bits_of_the_interpreter(collective: Collective, name: str) -> None:
    """In floating point, where the order of operands shows."""
    for ranks, ways in ((1, 1), (2, 1), (3, 1), (5, 1), (4, 2)):
        program = build(collective, name, ranks=ranks, root=ranks - 1 if collective.has_root else 0)
        if ways * max(len(program.lanes(rank)) for rank in range(ranks)) > 4 or program.span > 1:
            continue
        program = widen(program, ways)
        chance = np.random.default_rng(ranks)
        for length in (program.chunks, 1_024 * program.chunks, 40_000 * program.chunks):
            inputs = [
                chance.standard_normal((program.input_blocks(rank), length)).astype(np.float32)
                for rank in range(ranks)
            ]
            outputs = interpret(program, chunked(program, inputs), np.add)

            def main(
                communicator: Communicator,
                program: Program = program,
                inputs: Any = inputs,
                length: int = length,
            ) -> Any:
                rank = communicator.rank
                out = np.empty((program.output_blocks(rank), length), np.float32)
                code = communicator.run(collective, ReduceOp.SUM, program.root, inputs[rank], out)
                assert code == 0, communicator.error(name)
                return out

            results = run_ranks(ranks, main, custom=program)
            for rank, out in enumerate(results):
                expected = np.concatenate(outputs[rank]) if outputs[rank] else np.empty(0)
                assert out.tobytes() == expected.astype(np.float32).tobytes(), (ranks, rank)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_engine_and_numpy_agree(data: st.DataObject) -> None:
    """Several collectives in a row on one communicator, each with an algorithm of its own."""
    ranks = data.draw(st.integers(2, 6), "ranks")
    calls = data.draw(
        st.lists(
            st.tuples(st.sampled_from(CASES), st.integers(0, 30_000), st.integers(0, 5)),
            min_size=1,
            max_size=6,
        ),
        "calls",
    )
    names = {collective: name for (collective, name), _, _ in calls}

    def inputs_of(number: int, collective: Collective, length: int, root: int) -> list[Any]:
        chance = np.random.default_rng(number)
        return [
            chance.integers(
                -9, 9, (collective.input_blocks(ranks, is_root=rank == root), length), np.int64
            )
            for rank in range(ranks)
        ]

    def main(communicator: Communicator) -> None:
        for number, ((collective, _), length, choice) in enumerate(calls):
            root = choice % ranks if collective.has_root else 0
            program = build(collective, names[collective], ranks=ranks, root=root)
            inputs = inputs_of(number, collective, length, root)
            rank = communicator.rank
            out = np.empty((program.output_blocks(rank), length), np.int64)
            assert communicator.run(collective, 0, root, inputs[rank], out) == 0
            expected = wanted(program, inputs, np.add, rank)
            np.testing.assert_array_equal(out, np.array(expected).reshape(out.shape))

    run_ranks(ranks, main, override=names)
