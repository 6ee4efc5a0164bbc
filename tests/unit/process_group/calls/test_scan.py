"""scan, called by ranks that are threads, against NumPy's cumulative sums."""

from __future__ import annotations

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.base.collective import Collective
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.schedule.catalogue import ALGORITHMS
from tests.unit.process_group.ranks import run_ranks

_UFUNCS = {
    dist.ReduceOp.SUM: np.add,
    dist.ReduceOp.PRODUCT: np.multiply,
    dist.ReduceOp.MIN: np.minimum,
    dist.ReduceOp.MAX: np.maximum,
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_equals_numpy(ranks: int) -> None:
    inputs = np.random.default_rng(ranks).integers(-9, 9, (ranks, 3, 1001))

    def main(group: ProcessGroup) -> None:
        for op, ufunc in _UFUNCS.items():
            for async_op in (False, True):
                mine = inputs[group.rank()].copy()
                work = dist.scan(mine, op, group, async_op)
                assert (work is not None) == async_op
                if work is not None:
                    work.wait()
                due = ufunc.accumulate(inputs, axis=0)[group.rank()]
                np.testing.assert_array_equal(mine, due)
        wide = np.zeros((4, 3))
        wide[:, 1] = group.rank() + 1
        dist.scan(wide[:, 1], group=group)
        total = (group.rank() + 1) * (group.rank() + 2) / 2
        np.testing.assert_array_equal(wide, [[0, total, 0]] * 4)

    run_ranks(ranks, main)


@pytest.mark.parametrize("algorithm", ALGORITHMS[Collective.SCAN])
def test_bits_are_those_of_the_ranks_order_and_of_every_run(algorithm: str) -> None:
    """Seven ranks; where one rank combines all, the bits are those of a loop over the ranks."""
    ranks = 7
    inputs = np.random.default_rng(1).standard_normal((ranks, 50_000)).astype(np.float32)

    def main(group: ProcessGroup) -> list[bytes]:
        found = []
        for _ in range(3):
            mine = inputs[group.rank()].copy()
            dist.scan(mine, group=group, algorithm=algorithm)
            found.append(mine.tobytes())
        return found

    due = inputs[0].copy()
    for rank, (first, *others) in enumerate(run_ranks(ranks, main)):
        due = due + inputs[rank] if rank else due
        assert others == [first, first]
        np.testing.assert_allclose(np.frombuffer(first, np.float32), due, rtol=0, atol=1e-5)
        if algorithm != "recursive_doubling":
            assert first == due.tobytes()


def test_each_rank_has_its_own_factor() -> None:
    def main(group: ProcessGroup) -> float:
        mine = np.ones(1)
        dist.scan(mine, dist.premul_sum(10.0 ** group.rank()), group)
        return float(mine[0])

    assert run_ranks(3, main) == [1, 11, 111]


def test_averages_are_refused() -> None:
    def main(group: ProcessGroup) -> None:
        with pytest.raises(dist.InvalidArgumentError, match=r"AVG .* divide by rank \+ 1"):
            dist.scan(np.ones(1), dist.ReduceOp.AVG, group)
        with pytest.raises(dist.InvalidArgumentError, match="scan has no algorithm 'ring'"):
            dist.scan(np.ones(1), group=group, algorithm="ring")

    run_ranks(2, main)


def test_ranks_that_call_something_else_are_told() -> None:
    def main(group: ProcessGroup) -> str:
        with pytest.raises(dist.MismatchError) as caught:
            if group.rank() == 0:
                dist.all_reduce(np.ones(8), group=group)
            else:
                dist.scan(np.ones(8), dist.ReduceOp.MAX, group)
        return str(caught.value)

    for message in run_ranks(2, main):
        assert "rank 1 called scan(" in message and "MAX" in message
