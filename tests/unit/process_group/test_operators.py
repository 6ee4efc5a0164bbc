"""Operators and dtypes through the public face; the engine's own tests have more."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rallypoint as dist
from rallypoint.process_group.groups.group import ProcessGroup
from tests.unit.process_group.ranks import run_ranks


@pytest.mark.parametrize("dtype", ["int16", "uint8", "float16", "float32", "float64", "complex64"])
def test_premul_sum(dtype: str) -> None:
    def main(group: ProcessGroup) -> None:
        mine = np.arange(600).reshape(20, 30).astype(dtype)[::2, 1::3]
        operator = dist.premul_sum(0.5 * (group.rank() + 1))
        if np.dtype(dtype).kind in "iu":
            with pytest.raises(TypeError, match=r"PREMUL_SUM by .* does not apply to"):
                dist.all_reduce(mine, operator, group)
            return
        wanted = mine * np.dtype(dtype).type(1.5)
        dist.all_reduce(mine, operator, group)
        np.testing.assert_array_equal(mine, wanted)

    run_ranks(2, main)


def test_operators_that_do_not_apply() -> None:
    def main(group: ProcessGroup) -> None:
        with pytest.raises(TypeError, match=r"BAND does not apply to float64\[3\]"):
            dist.all_reduce(np.ones(3), dist.ReduceOp.BAND, group)
        with pytest.raises(TypeError, match="MAX does not apply to complex64"):
            dist.reduce(np.ones(3, np.complex64), 0, dist.ReduceOp.MAX, group)
        with pytest.raises(ValueError, match="needs a factor"):
            dist.all_reduce(np.ones(3), dist.ReduceOp.PREMUL_SUM, group)

    run_ranks(1, main)


@pytest.mark.needs_torch
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
def test_bfloat16_of_torch(layout: str) -> None:
    torch: Any = pytest.importorskip("torch")

    def main(group: ProcessGroup) -> None:
        me = group.rank()
        base = (torch.arange(64) / 7).to(torch.bfloat16).reshape(8, 8) * (me + 1)
        mine = base[::2, ::3] if layout == "strided" else base
        # Three ranks: 1 x, 2 x and 3 x, each rounded to bfloat16; summed in float32, rounded once.
        parts = [(torch.arange(64) / 7).to(torch.bfloat16).reshape(8, 8) * r for r in (1, 2, 3)]
        wanted = sum(part.float() for part in parts).to(torch.bfloat16)
        wanted = wanted[::2, ::3] if layout == "strided" else wanted
        dist.all_reduce(mine, group=group)
        assert torch.equal(mine, wanted)
        out = [torch.empty_like(mine) for _ in range(3)]
        dist.all_gather(out, mine, group)
        assert all(torch.equal(array, wanted) for array in out)

    run_ranks(3, main)
