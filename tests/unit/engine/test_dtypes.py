"""Every dtype and operator against NumPy, and arrays of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rallypoint.engine.communicator import BAD_BUFFER, BAD_OPERATOR, DTYPES, Communicator, ReduceOp
from rallypoint.engine.engine_work import EngineWork
from rallypoint.schedule.program import Collective
from tests.unit.engine.ranks import begin, run_ranks

COUNTS = (0, 1, 7, 16, 333, 40_001, 150_001)
BFLOAT16 = DTYPES.index("bfloat16")
NUMPY: dict[ReduceOp, Any] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
BITS = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}


def applies(dtype: str, op: ReduceOp) -> bool:
    if dtype == "bool":
        return op is not ReduceOp.AVG
    if dtype.startswith("complex"):
        return op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT)
    return op not in BITS or "int" in dtype


def narrow(values: Any) -> Any:
    """float32 to bfloat16 bits, to the nearest, ties to even: by way of integers."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def widen(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def make(dtype: str, count: int, seed: int) -> Any:
    rng = np.random.default_rng([seed, count])
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype == "bfloat16":
        return narrow(rng.standard_normal(count))
    if "int" in dtype:
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, count, dtype, endpoint=True)
    values = rng.standard_normal(count)
    if dtype.startswith("complex"):
        return (values + 1j * rng.standard_normal(count)).astype(dtype)
    values[rng.random(count) < 0.05] = np.nan
    values[rng.random(count) < 0.05] = np.inf
    return values.astype(dtype)


def wanted(dtype: str, op: ReduceOp, inputs: list[Any]) -> Any:
    """The definition: in rank order; 16-bit floats in float32, rounded once."""
    half = dtype in ("float16", "bfloat16")
    if half:
        inputs = [widen(v) if dtype == "bfloat16" else v.astype(np.float32) for v in inputs]
    total = inputs[0]
    with np.errstate(all="ignore"):
        for values in inputs[1:]:
            total = NUMPY[op](total, values)
        if op is ReduceOp.AVG and "int" in dtype:
            whole = [int(value) for value in total]
            total = np.array([abs(v) // len(inputs) * (1 if v >= 0 else -1) for v in whole], dtype)
        elif op is ReduceOp.AVG:
            total = total / total.dtype.type(len(inputs))
        if half:
            return narrow(total) if dtype == "bfloat16" else total.astype(np.float16)
    return total


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("ranks", [1, 2, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_as_numpy(dtype: str, ranks: int) -> None:
    cases = [(op, count) for op in NUMPY for count in COUNTS]

    def main(communicator: Communicator) -> list[Any]:
        results = []
        for op, count in cases:
            mine = make(dtype, count, communicator.rank)
            work = communicator.submit(
                Collective.ALL_REDUCE,
                op,
                0,
                mine,
                mine,
                dtype=BFLOAT16 if dtype == "bfloat16" else -1,
            )
            if not applies(dtype, op):
                assert work == BAD_OPERATOR, op
                continue
            assert not isinstance(work, int), work
            EngineWork(work, communicator, "all_reduce").wait()
            results.append(mine)
        return results

    results = run_ranks(ranks, main, override="direct_one_shot")
    for case, (op, count) in enumerate(c for c in cases if applies(dtype, c[0])):
        expected = wanted(dtype, op, [make(dtype, count, rank) for rank in range(ranks)])
        for rank in range(ranks):
            got = results[rank][case]
            assert got.tobytes() == results[0][case].tobytes()
        got = results[0][case]
        if dtype == "bfloat16":
            got, expected = widen(got), widen(expected)
        if dtype.startswith("complex"):  # NumPy divides and multiplies in other ways
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(got, expected, err_msg=f"{op} {count}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_carried(dtype: str) -> None:
    def main(communicator: Communicator) -> None:
        for count in COUNTS:
            mine = make(dtype, count, communicator.rank)
            out = np.zeros((2, count), mine.dtype)
            assert communicator.run(Collective.ALL_GATHER, 0, 0, mine, out) == 0
            for rank in range(2):
                assert out[rank].tobytes() == make(dtype, count, rank).tobytes()

    run_ranks(2, main)


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
)
def test_premultiplied_sum(dtype: str) -> None:
    """Each rank has a factor of its own; the input stays as it is."""

    def main(communicator: Communicator) -> None:
        rank = communicator.rank
        kind = BFLOAT16 if dtype == "bfloat16" else -1
        ones = narrow(np.ones(100)) if dtype == "bfloat16" else np.ones(100, dtype)
        out = np.zeros_like(ones)
        begin(
            communicator,
            Collective.ALL_REDUCE,
            ReduceOp.PREMUL_SUM,
            0,
            ones,
            out,
            dtype=kind,
            factor=0.5 + rank,
        ).wait()
        assert ((widen(out) if dtype == "bfloat16" else out) == 4.5).all()
        assert ((widen(ones) if dtype == "bfloat16" else ones) == 1).all()

    run_ranks(3, main)


def test_premultiplied_sum_is_not_for_integers() -> None:
    def main(communicator: Communicator) -> None:
        values = np.ones(3, np.int32)
        arguments = (Collective.ALL_REDUCE, ReduceOp.PREMUL_SUM, 0, values, values)
        assert communicator.submit(*arguments, factor=2.0) == BAD_OPERATOR

    run_ranks(1, main)


def test_average_of_16_bit_floats_does_not_overflow() -> None:
    def main(communicator: Communicator) -> None:
        values = np.full(20_000, 60_000, np.float16)
        assert communicator.run(Collective.ALL_REDUCE, ReduceOp.AVG, 0, values, values) == 0
        assert (values == np.float16(60_000)).all()

    run_ranks(4, main)


@pytest.mark.parametrize("count", [1, 3, 7, 8, 19])
def test_small_float16_and_those_that_are_no_numbers(count: int) -> None:
    """As NumPy adds them, also where the processor takes eight at a time and some are left."""
    edges = [6e-8, 1e-7, 6.1e-5, -5.9e-8, 65504.0, np.inf, np.nan, -0.0, 3e-5]
    values = np.resize(np.array(edges, np.float16), count)
    expected = (values.astype(np.float32) + values[::-1]).astype(np.float16)

    def main(communicator: Communicator) -> None:
        mine = (values if communicator.rank == 0 else values[::-1]).copy()
        assert communicator.run(Collective.ALL_REDUCE, ReduceOp.SUM, 0, mine, mine) == 0
        np.testing.assert_array_equal(mine, expected)

    with np.errstate(over="ignore", invalid="ignore"):
        run_ranks(2, main)


@pytest.mark.needs_torch
def test_tensors() -> None:
    """PyTorch's tensors of the CPU, every dtype; not strided ones, nor on other devices."""
    import torch

    names = [name for name in DTYPES if hasattr(torch, name)]
    assert "bfloat16" in names

    def main(communicator: Communicator) -> None:
        for name in names:
            dtype = getattr(torch, name)
            mine = torch.ones(5, 7, dtype=dtype)
            assert communicator.run(Collective.ALL_REDUCE, ReduceOp.MAX * 0, 0, mine, mine) == 0
            assert (mine == torch.ones(5, 7, dtype=dtype) * (1 if name == "bool" else 2)).all()
        wide = torch.ones(4, 4)
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, wide[:, ::2], wide) == BAD_BUFFER
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, wide.t()[1:], wide) == BAD_BUFFER
        meta = torch.ones(4, device="meta")
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, meta, meta) == BAD_BUFFER
        mixed = np.zeros(16, np.float32)
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, wide, mixed) == 0
        assert (mixed == 2).all()
        bits = torch.ones(3).requires_grad_()
        assert communicator.run(Collective.ALL_REDUCE, 0, 0, bits, mixed[:3]) == 0

    run_ranks(2, main)
