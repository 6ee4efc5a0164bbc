"""Every built-in program, run by the interpreter on symbols, gives what its collective promises."""

from __future__ import annotations

from collections import Counter

import pytest

from rallypoint.schedule.catalogue import ALGORITHMS, build
from rallypoint.schedule.program import Collective, Program, ProgramError, Send
from rallypoint.schedule.proof.interpret import interpret

Terms = tuple[str, ...]  # a chunk as the ordered list of what was combined into it
RANKS = range(1, 18)


def run(program: Program) -> list[list[Terms]]:
    inputs = [
        [(f"{rank}.{chunk}",) for chunk in range(program.input_blocks(rank) * program.chunks)]
        for rank in range(program.ranks)
    ]
    return interpret(program, inputs, lambda left, right: left + right)


CASES = [(c, name) for c in Collective if c is not Collective.SEND for name in ALGORITHMS[c]]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("collective", "name"), CASES, ids=lambda value: str(value).lower())
def test_each_output_holds_its_sources_once(collective: Collective, name: str, ranks: int) -> None:
    roots = sorted({0, ranks // 2, ranks - 1}) if collective.has_root else [0]
    for root in roots:
        program = build(collective, name, ranks=ranks, root=root)
        outputs = run(program)
        for rank, chunks in enumerate(outputs):
            assert len(chunks) == program.output_blocks(rank) * program.chunks
            for place, terms in enumerate(chunks):
                block, chunk = divmod(place, program.chunks)
                sources = collective.sources(rank=rank, block=block, ranks=ranks, root=root)
                wanted = [f"{peer}.{index * program.chunks + chunk}" for peer, index in sources]
                if collective is not Collective.BARRIER:
                    assert sorted(terms) == sorted(wanted)
        if collective is Collective.ALL_REDUCE:
            # The same order of operands everywhere: the same bits everywhere.
            assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize("ranks", RANKS)
def test_direct_all_reduce_combines_in_rank_order(ranks: int) -> None:
    for name in ("direct_one_shot", "direct_two_shot"):
        for terms in run(build(Collective.ALL_REDUCE, name, ranks=ranks))[0]:
            assert [int(term.split(".")[0]) for term in terms] == list(range(ranks))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", ALGORITHMS[Collective.SCAN])
def test_prefixes_are_combined_in_rank_order(name: str, ranks: int) -> None:
    for rank, (terms,) in enumerate(run(build(Collective.SCAN, name, ranks=ranks))):
        assert terms == tuple(f"{peer}.0" for peer in range(rank + 1))


def test_send_moves_one_message() -> None:
    assert run(build(Collective.SEND, "direct", ranks=2))[1] == [("0.0",)]


@pytest.mark.parametrize("ranks", RANKS)
def test_barrier_hears_from_all(ranks: int) -> None:
    program = build(Collective.BARRIER, "direct", ranks=ranks)
    run(program)  # raises if a message is missing or left over
    heard = Counter(
        receiver
        for rank in range(ranks)
        for lane in program.lanes(rank)
        for operation in lane
        if isinstance(operation, Send)
        for receiver in operation.to
    )
    assert heard == {rank: ranks - 1 for rank in range(ranks) if ranks > 1}


@pytest.mark.parametrize("ranks", RANKS)
def test_no_lane_sends_more_than_declared(ranks: int) -> None:
    for collective, algorithms in ALGORITHMS.items():
        for name in algorithms:
            size = 2 if collective is Collective.SEND else ranks
            program = build(collective, name, ranks=size)
            lanes = [lane for rank in range(size) for lane in program.lanes(rank)]
            most = max(sum(isinstance(o, Send) for o in lane) for lane in lanes)
            assert program.sends >= max(most, 1), (collective, name)


@pytest.mark.parametrize("per_node", [2, 3, 4, 6])
@pytest.mark.parametrize("ranks", RANKS)
def test_algorithms_that_know_nodes(ranks: int, per_node: int) -> None:
    for name in ("binomial_tree", "binary_tree", "double_tree", "node_ring", "two_level"):
        try:
            program = build(Collective.ALL_REDUCE, name, ranks=ranks, per_node=per_node)
        except ProgramError:
            assert name == "two_level"
            assert ranks % per_node != 0
            continue
        outputs = run(program)
        assert all(output == outputs[0] for output in outputs)
        for chunk, terms in enumerate(outputs[0]):
            assert sorted(terms) == sorted(f"{rank}.{chunk}" for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ring_moves_no_more_than_it_must(ranks: int) -> None:
    """Each rank sends 2 (n - 1) chunks of 1/n, to its right neighbour only."""
    program = build(Collective.ALL_REDUCE, "ring", ranks=ranks)
    for rank in range(ranks):
        sends = [o for o in program.lanes(rank)[0] if isinstance(o, Send)]
        assert len(sends) == 2 * (ranks - 1)
        assert {send.to for send in sends} == {((rank + 1) % ranks,)}
