"""Each epoch has each sample once, however many ranks share a batch, and in whatever proportion."""

from __future__ import annotations

import numpy as np
import pytest

from rallypoint import elastic
from rallypoint.base.errors import InvalidArgumentError


@pytest.mark.parametrize("weights", [None, [1.0, 1.0, 1.0], [3.0, 1.0, 0.0], [0.2, 0.5, 0.3]])
@pytest.mark.parametrize(("samples", "batch"), [(20, 5), (7, 4), (3, 10), (11, 1)])
def test_all_ranks_together_take_each_sample_once(
    samples: int, batch: int, weights: list[float] | None
) -> None:
    shared = elastic.Sampler(samples, batch, seed=3, weights=weights)
    alone = elastic.Sampler(samples, batch, seed=3)
    taken = []
    for step in range(samples):  # `batch` epochs
        parts = [shared.indices(step, rank, 3) for rank in range(3)]
        whole = alone.indices(step, 0, 1)
        assert (np.concatenate(parts) == whole).all()
        assert len(whole) == batch
        assert shared.epoch(step) == step * batch // samples
        taken.append(whole)
    epochs = np.concatenate(taken).reshape(batch, samples)
    assert (np.sort(epochs, axis=1) == np.arange(samples)).all()


def test_shares_are_as_the_weights() -> None:
    sampler = elastic.Sampler(100, 20, weights=[1, 3, 0])
    assert [len(sampler.indices(0, rank, 3)) for rank in range(3)] == [5, 15, 0]


@pytest.mark.parametrize(
    ("arguments", "weights", "text"),
    [
        ((0, 1), None, "samples=0 and global_batch=1 must be positive"),
        ((1, 0), None, "samples=1 and global_batch=0 must be positive"),
        ((1, 1), [1.0, -1.0], "weights=.* must be positive shares"),
        ((1, 1), [0.0], "weights=.* must be positive shares"),
        ((1, 1), [], "weights=.* must be positive shares"),
    ],
)
def test_what_cannot_be(arguments: tuple[int, int], weights: list[float] | None, text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        elastic.Sampler(*arguments, weights=weights)


def test_who_cannot_take_a_share() -> None:
    sampler = elastic.Sampler(10, 2, weights=[1.0, 1.0])
    with pytest.raises(InvalidArgumentError, match="there are 2 weights, but 3 ranks"):
        sampler.indices(0, 0, 3)
    with pytest.raises(InvalidArgumentError, match="rank=2 is not one of 2 ranks that train"):
        sampler.indices(0, 2, 2)
