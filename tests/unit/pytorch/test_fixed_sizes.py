"""What keeps the number of ranks is refused by elastic.State, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import rallypoint
from rallypoint import elastic

torch: Any = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the import of torch's optimizers
]


@pytest.fixture
def alone() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_refusals(alone: None) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.utils.data.distributed import DistributedSampler

    net = torch.nn.Linear(2, 2)
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for value, instead in (
        (torch.nn.parallel.DistributedDataParallel(net), "elastic.DistributedDataParallel"),
        (zero, "use the optimizer in it"),
        (DistributedSampler([1, 2, 3]), r"use elastic\.Sampler"),
    ):
        with pytest.raises(rallypoint.InvalidArgumentError, match=instead) as caught:
            elastic.State(step=0, mine=value)
        assert f"mine is a {type(value).__name__}, which fixes" in str(caught.value)


def test_models_and_optimizers_are_taken() -> None:
    net = torch.nn.Linear(2, 2)
    state = elastic.State(net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    assert state.net is net
