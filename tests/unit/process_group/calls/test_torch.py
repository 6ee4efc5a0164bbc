"""CPU tensors of PyTorch in every collective, against the same call on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks

torch: Any = pytest.importorskip("torch")
pytestmark = pytest.mark.needs_torch


def tensors(rank: int, layout: str) -> Any:
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6) * (rank + 1)
    match layout:
        case "transposed":
            return base.t()
        case "strided":
            return base[::2, 1::2]
        case "requires_grad":
            return base.clone().requires_grad_()
        case "0-d":
            return base[1, 1]
        case "misaligned":
            moved = torch.frombuffer(bytearray(8 * 24 + 8), dtype=base.dtype, count=24, offset=3)
            return moved.reshape(4, 6).copy_(base)
    return base


@pytest.mark.parametrize(
    "layout", ["contiguous", "transposed", "strided", "requires_grad", "0-d", "misaligned"]
)
def test_every_collective(layout: str) -> None:
    ranks = 3

    def main(group: ProcessGroup) -> None:
        me = group.rank()
        inputs = [tensors(rank, layout).detach() for rank in range(ranks)]
        one = inputs[0]

        def fresh() -> list[Any]:
            return [tensors(9, layout).detach().clone() for _ in range(ranks)]

        mine = tensors(me, layout)
        dist.all_reduce(mine, group=group)
        assert torch.equal(mine, one * 6)
        mine = tensors(me, layout)
        dist.broadcast(mine, 2, group)
        assert torch.equal(mine, one * 3)
        mine = tensors(me, layout)
        dist.reduce(mine, 1, group=group)
        assert torch.equal(mine, one * (6 if me == 1 else me + 1))
        mine, out = tensors(me, layout), fresh()
        dist.all_gather(out, mine, group)
        assert all(map(torch.equal, out, inputs))
        out = fresh()
        dist.gather(mine, out if me == 0 else None, group=group)
        assert me > 0 or all(map(torch.equal, out, inputs))
        got = fresh()[0]
        dist.scatter(got, inputs if me == 1 else None, 1, group)
        assert torch.equal(got, inputs[me])
        dist.reduce_scatter(got, inputs, group=group)
        assert torch.equal(got, inputs[me] * ranks)
        out = fresh()
        dist.all_to_all(out, [one * (10 * me + to) for to in range(ranks)], group)
        assert all(torch.equal(out[rank], one * (10 * rank + me)) for rank in range(ranks))
        large = torch.empty(ranks, *one.shape, dtype=one.dtype)
        dist.all_gather_into_tensor(large, mine, group)
        assert torch.equal(large, torch.stack(inputs))
        dist.reduce_scatter_tensor(got, large, group=group)
        assert torch.equal(got, inputs[me] * ranks)
        if me == 0:
            dist.send(mine, 1, group)
        elif me == 1:
            dist.recv(got, 0, group)
            assert torch.equal(got, inputs[0])

    run_ranks(ranks, main)


def test_refused_tensors_say_what_to_do() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)

    def main(group: ProcessGroup) -> None:
        for tensor, words in (
            (torch.ones(3, device="meta"), r"\.cpu\(\)"),
            (torch.ones(3).to_sparse(), r"\.to_dense\(\)"),
            (torch.ones(3, dtype=torch.complex64).conj(), "clone"),
            (torch.ones(3).to(torch.float8_e4m3fn), "float8"),
            (freed, "no memory of its own"),
        ):
            with pytest.raises(TypeError, match=words):
                dist.all_reduce(tensor, group=group)

    run_ranks(1, main)


def test_tensor_and_array_in_one_call() -> None:
    def main(group: ProcessGroup) -> None:
        mine = torch.ones(5) if group.rank() else np.ones(5, np.float32)
        dist.all_reduce(mine, group=group)
        assert (mine == 2).all()

    run_ranks(2, main)
