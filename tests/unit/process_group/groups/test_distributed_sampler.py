"""Which rank gets which samples: in order, the same as with PyTorch's; else each one once."""

from __future__ import annotations

from collections import Counter

import pytest

from rallypoint import DistributedSampler
from rallypoint.base.errors import InvalidArgumentError


@pytest.mark.needs_torch
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("length", "replicas"), [(10, 1), (10, 3), (3, 2), (2, 5), (12, 4)])
def test_in_order_it_is_pytorchs(length: int, replicas: int, drop_last: bool) -> None:
    from torch.utils.data import DistributedSampler as Torchs

    for rank in range(replicas):
        ours = DistributedSampler(length, replicas, rank, shuffle=False, drop_last=drop_last)
        theirs = Torchs(range(length), replicas, rank, shuffle=False, drop_last=drop_last)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_each_epoch_has_each_sample_in_another_order(replicas: int) -> None:
    orders = []
    for epoch in range(2):
        parts = []
        for rank in range(replicas):
            sampler = DistributedSampler(range(100), replicas, rank)
            sampler.set_epoch(epoch)
            parts.append(list(sampler))
            assert len(sampler) == len(parts[-1])
        counts = Counter(index for part in parts for index in part)
        assert set(counts) == set(range(100))
        assert max(counts.values()) <= 2  # repeated so that all get as many
        orders.append(parts)
    assert orders[0] != orders[1]


def test_a_rank_that_is_none() -> None:
    with pytest.raises(InvalidArgumentError, match="rank=2 is not one of num_replicas=2; it must"):
        DistributedSampler(10, 2, 2)
