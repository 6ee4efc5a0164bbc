"""Softmax and L2 normalisation of a vector that no rank holds as a whole.

    rallypoint run --nproc-per-node 4 examples/communication/softmax.py

Each rank holds some of the items. Two numbers must be agreed on for a softmax, the largest item and
the sum of the exponentials; one for a norm. The vector itself never travels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import rallypoint as dist

Array = NDArray[Any]


def softmax(part: Array) -> Array:
    """This rank's part of the softmax of the vector of which it holds `part`."""
    largest = np.array(part.max(initial=-np.inf))
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # exp() of what remains cannot overflow
    exponentials: Array = np.exp(part - largest)
    total = np.array(exponentials.sum())
    dist.all_reduce(total)
    exponentials /= total
    return exponentials


def normalised(part: Array) -> Array:
    """This rank's part of the vector divided by its L2 norm."""
    squares = np.array(np.square(part).sum())
    dist.all_reduce(squares)
    quotients: Array = part / np.sqrt(squares)
    return quotients


def main() -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    whole = np.random.default_rng(0).standard_normal(1_003) * 30  # only to check the result
    part = np.array_split(whole, ranks)[rank]

    exact = np.exp(whole - whole.max())
    exact /= exact.sum()
    assert np.allclose(softmax(part), np.array_split(exact, ranks)[rank], rtol=1e-12)
    unit = whole / np.linalg.norm(whole)
    assert np.allclose(normalised(part), np.array_split(unit, ranks)[rank], rtol=1e-12)
    print(f"rank {rank}: its {part.size} of {whole.size} items are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
