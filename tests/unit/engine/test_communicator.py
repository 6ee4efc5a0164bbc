"""The native engine against NumPy and against the interpreter, with ranks as threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rallypoint._native import region_bytes
from rallypoint.base.errors import CollectiveTimeoutError, MismatchError, PeerError, PeerLostError
from rallypoint.engine.communicator import Communicator, ReduceOp
from rallypoint.schedule.catalogue import ALGORITHMS
from rallypoint.schedule.program import (
    Buffer,
    Chunks,
    Collective,
    Incoming,
    Lane,
    Program,
    Reduce,
    Send,
    receive,
)
from rallypoint.schedule.proof.interpret import interpret
from tests.unit.engine.ranks import move, planner, run_ranks

# Inline, one slot, several chunks of uneven length, several pieces, the ring of slots wrapping.
COUNTS = (0, 1, 2, 7, 12, 13, 100, 5_000, 70_001, 400_003)
NUMPY = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def arrays(ranks: int, count: int, dtype: str, seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return [rng.standard_normal(count).astype(dtype) for _ in range(ranks)]
    return [rng.integers(-1000, 1000, count).astype(dtype) for _ in range(ranks)]


def expected(op: ReduceOp, inputs: list[Any]) -> Any:
    """The definition, in rank order."""
    with np.errstate(over="ignore"):
        total = inputs[0].copy()
        for values in inputs[1:]:
            total = NUMPY[op](total, values)
    if op is ReduceOp.AVG:
        divided = total / len(inputs)
        return (np.trunc(divided) if total.dtype.kind == "i" else divided).astype(total.dtype)
    return total


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("override", ALGORITHMS[Collective.ALL_REDUCE])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_reduce_equals_numpy(ranks: int, override: str) -> None:
    cases = [
        (count, op, dtype)
        for count in COUNTS
        for op, dtype in (
            (ReduceOp.SUM, "float64"),
            (ReduceOp.AVG, "float32"),
            (ReduceOp.MAX, "int64"),
            (ReduceOp.AVG, "int32"),
            (ReduceOp.PRODUCT, "int32"),
            (ReduceOp.MIN, "float32"),
        )
    ]

    def main(communicator: Communicator) -> list[Any]:
        results = []
        for case, (count, op, dtype) in enumerate(cases):
            mine = arrays(ranks, count, dtype, case)[communicator.rank]
            assert communicator.run(Collective.ALL_REDUCE, op, 0, mine, mine) == 0
            results.append(mine)
        return results

    results = run_ranks(ranks, main, override=override)
    for case, (count, op, dtype) in enumerate(cases):
        wanted = expected(op, arrays(ranks, count, dtype, case))
        for rank in range(ranks):
            # Bit-identical everywhere; in rank order also equal to the definition's bits.
            assert results[rank][case].tobytes() == results[0][case].tobytes()
        if not override.startswith("direct"):
            np.testing.assert_allclose(results[0][case], wanted, rtol=1e-4, atol=1e-5)
        else:
            assert results[0][case].tobytes() == wanted.tobytes(), (count, op, dtype)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_sequences_of_operations(data: st.DataObject) -> None:
    """Mixed operations and sizes back to back: no line or slot is used again too early."""
    ranks = data.draw(st.integers(1, 6), "ranks")
    override = data.draw(st.sampled_from(["", *ALGORITHMS[Collective.ALL_REDUCE]]), "override")
    size = st.one_of(st.integers(0, 40), st.integers(0, 100_000))
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["reduce", "broadcast", "gather", "barrier", "send"]),
                size,
                st.integers(0, 100),
            ),
            min_size=1,
            max_size=25,
        ),
        "steps",
    )

    def main(communicator: Communicator) -> None:
        me = communicator.rank
        for number, (step, count, choice) in enumerate(steps):
            inputs = arrays(ranks, count, "int64", number)
            mine = inputs[me].copy()
            root = choice % ranks
            if step == "reduce":
                assert communicator.run(Collective.ALL_REDUCE, 0, 0, mine, mine) == 0
                np.testing.assert_array_equal(mine, sum(inputs))
            elif step == "broadcast":
                assert communicator.run(Collective.BROADCAST, 0, root, mine, mine) == 0
                np.testing.assert_array_equal(mine, inputs[root])
            elif step == "gather":
                out = np.empty((ranks, count), np.int64)
                assert communicator.run(Collective.ALL_GATHER, 0, 0, mine, out) == 0
                np.testing.assert_array_equal(out, inputs)
            elif step == "barrier":
                assert communicator.run(Collective.BARRIER, 0, 0, mine[:0], mine[:0]) == 0
            elif ranks > 1 and me in (root, (root + 1) % ranks):
                to = (root + 1) % ranks
                assert move(communicator, root, to, choice, mine) == 0
                np.testing.assert_array_equal(mine, inputs[root])

    run_ranks(ranks, main, override=override)


def two_way_ring(ranks: int) -> Program:
    """Two lanes: blocks 0 go round to the right, blocks 1 to the left, as an all-gather."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        both: list[Lane] = []
        for lane, step in ((0, 1), (1, -1)):
            own = Chunks(Buffer.INPUT, lane)
            before, after = (rank - step) % ranks, (rank + step) % ranks
            operations: list[Send | Reduce] = [
                Send(own, (after,)),
                Reduce((own,), (Chunks(Buffer.OUTPUT, 2 * rank + lane),)),
            ]
            for distance in range(1, ranks):
                place = Chunks(Buffer.OUTPUT, 2 * ((rank - step * distance) % ranks) + lane)
                operations.append(receive(before, place, lane=lane))
                if distance < ranks - 1:
                    operations.append(Send(place, (after,)))
            both.append(tuple(operations))
        return tuple(both)

    return Program("two_way_ring", Collective.ALL_GATHER, ranks, chunks=2, sends=ranks, lanes=lanes)


def spans_and_scratch(ranks: int) -> Program:
    """All chunks in one operation, through scratch, to two targets, own operand in the middle."""

    def lanes(rank: int) -> tuple[Lane, ...]:
        everything = Chunks(Buffer.INPUT, 0, ranks)
        others = tuple(peer for peer in range(ranks) if peer != rank)
        middle = len(others) // 2
        operands: tuple[Chunks | Incoming, ...] = (
            *(Incoming(peer) for peer in others[:middle]),
            everything,
            *(Incoming(peer) for peer in others[middle:]),
        )
        scratch, out = Chunks(Buffer.SCRATCH, 0, ranks), Chunks(Buffer.OUTPUT, 0, ranks)
        reduce = Reduce(operands, (scratch, out))
        return ((Send(everything, others), reduce, Reduce((scratch,), (out,))),)

    return Program(
        "spans",
        Collective.ALL_REDUCE,
        ranks,
        chunks=ranks,
        sends=1,
        lanes=lanes,
        scratch_chunks=ranks,
        span=ranks,
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("make", [two_way_ring, spans_and_scratch])
def test_custom_program_as_interpreted(make: Any, ranks: int) -> None:
    """Lanes, spans, scratch and several targets: the engine does what the interpreter does."""
    program: Program = make(ranks)
    blocks_out = program.output_blocks(0)
    for count in (program.chunks, 60 * program.chunks, 64_000 * program.chunks):
        inputs = arrays(ranks, count, "float64", count)
        chunks = [list(values.reshape(program.chunks, -1)) for values in inputs]
        wanted = interpret(program, chunks, np.add)

        def main(communicator: Communicator, count: int = count, inputs: Any = inputs) -> Any:
            out = np.empty((blocks_out, count))
            mine = inputs[communicator.rank].copy()
            assert communicator.run(program.collective, 0, 0, mine, out) == 0
            return out

        for rank, out in enumerate(run_ranks(ranks, main, custom=program)):
            assert np.array_equal(out.ravel(), np.concatenate(wanted[rank]))


def mismatch(main: Callable[[Communicator], PeerError], *words: str) -> None:
    """All of three ranks raise it, and say so in these words.

    They wait only for a moment until another one has told what it called. Where one did not get its
    turn within that, they are asked again.
    """
    texts = [""]
    while not all(word in text for word in words for text in texts):
        errors = run_ranks(3, main)
        assert all(isinstance(error, MismatchError) for error in errors), errors
        texts = list(map(str, errors))


def test_different_sizes_raise_on_every_rank() -> None:
    def main(communicator: Communicator) -> PeerError:
        mine = np.ones(8 if communicator.rank == 1 else 4)
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, mine, mine) != 0
        return communicator.error("all_reduce")

    mismatch(main, "all_reduce #0 (8 x float64, SUM)", "all_reduce #0 (4 x float64, SUM)", "rank 1")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((Collective.ALL_REDUCE, ReduceOp.SUM, 0), (Collective.ALL_REDUCE, ReduceOp.MAX, 0)),
        ((Collective.BROADCAST, 0, 0), (Collective.BROADCAST, 0, 1)),
        ((Collective.ALL_REDUCE, 0, 0), (Collective.BARRIER, 0, 0)),
        ((Collective.ALL_REDUCE, 0, 0), (Collective.BROADCAST, 0, 0)),
    ],
)
def test_different_operations_raise_on_every_rank(one: Any, other: Any) -> None:
    def main(communicator: Communicator) -> PeerError:
        collective, op, root = other if communicator.rank == 0 else one
        mine = np.ones(0 if collective is Collective.BARRIER else 3)
        code = communicator.run(collective, op, root, mine, mine)
        if code == 0:  # a root that only sends learns of it in its next operation
            code = communicator.run(Collective.ALL_REDUCE, 0, 0, mine, mine)
        assert code != 0
        return communicator.error("all_reduce")

    mismatch(main, "different operations")


def test_peer_that_left_is_named() -> None:
    """If one on another host does not say soon enough that it leaves, it counts as dead."""

    def main(communicator: Communicator) -> None:
        values = np.ones(3)
        if communicator.rank == 1:
            communicator.leave()
            return
        while 1 not in [*communicator.here, *communicator.gone()]:
            time.sleep(0.001)
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, values, values) != 0
        error = communicator.error("all_reduce")
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        assert "exited or left the group before" in str(error)

    run_ranks(2, main)


def test_last_message_of_a_peer_that_left_still_arrives() -> None:
    def main(communicator: Communicator) -> None:
        values = np.full(3, float(communicator.rank))
        assert move(communicator, 0, 1, 0, values) == 0
        if communicator.rank == 0:
            communicator.leave()
        assert (values == 0).all()

    for _ in range(20):
        run_ranks(2, main)


def test_silent_peer_is_a_timeout() -> None:
    def main(communicator: Communicator) -> None:
        values = np.ones(3)
        if communicator.rank == 0:
            assert communicator.run(Collective.ALL_REDUCE, 0, 0, values, values) != 0
            error = communicator.error("all_reduce")
            assert isinstance(error, CollectiveTimeoutError)
            assert "waited 0.2 s for rank 1" in str(error)

    run_ranks(2, main, timeout_s=0.2)


@pytest.mark.parametrize(
    "values",
    [
        np.ones(3, "m8[s]"),
        np.ones(3, ">f8"),
        np.ones(3, np.longdouble),
        np.ones(3, np.clongdouble),
        np.array([b"a", b"b"]),
        np.ones((4, 4)).T[1:],
        7,
    ],
)
def test_buffer_that_cannot_be_used_changes_nothing(values: Any) -> None:
    def main(communicator: Communicator) -> None:
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, values, values) == -1

    run_ranks(1, main)


def test_region_of_another_size_or_group_is_refused() -> None:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(RuntimeError, match="wrong size"):
            make(fd)
        os.ftruncate(fd, region_bytes(2))
        with pytest.raises(RuntimeError, match="another version"):
            make(fd)
    finally:
        os.close(fd)


def make(fd: int) -> Communicator:
    return Communicator(
        fd,
        rank=1,
        ranks=2,
        plan=planner(1, 2, "", None),
        timeout_s=1,
        spins=0,
        yields=0,
    )
