"""Elastic hybrid sharding in one rank: what it refuses, and what it undoes after a loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: E402

import rallypoint as dist  # noqa: E402
from rallypoint import elastic  # noqa: E402
from rallypoint.base.errors import AlreadyInitializedError, InvalidArgumentError  # noqa: E402
from rallypoint.pytorch.elastic import HybridShard, shard_mesh  # noqa: E402

pytestmark = [
    pytest.mark.needs_torch,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "reset_iter_state"), reason="PyTorch before 2.13: no reset"
    ),
]


@pytest.fixture
def replicas() -> Iterator[elastic.Replicas]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    yield elastic.Replicas(shards=1)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    dist.destroy_process_group()


def sharded(replicas: elastic.Replicas) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return fully_shard(net, mesh=shard_mesh(replicas))


def test_modules_are_refused_by_name(replicas: elastic.Replicas) -> None:
    with pytest.raises(InvalidArgumentError, match="applied, not a Linear"):
        HybridShard(torch.nn.Linear(2, 2), replicas)
    net = sharded(replicas)
    replicas.shards = 2
    with pytest.raises(InvalidArgumentError, match=r"parameter 0\.weight is not sharded over"):
        HybridShard(net, replicas)


def test_an_older_pytorch_is_refused(
    replicas: elastic.Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = sharded(replicas)
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state")
    with pytest.raises(InvalidArgumentError, match=r"needs PyTorch 2\.13 or newer, and this is \d"):
        HybridShard(net, replicas)


def test_torchs_groups_are_refused(replicas: elastic.Replicas) -> None:
    shard_mesh(replicas)
    with pytest.raises(AlreadyInitializedError, match="leave its init_process_group to shard_mesh"):
        shard_mesh(replicas)
    with pytest.raises(InvalidArgumentError, match=r"use rallypoint\.new_group"):
        torch.distributed.new_group([0])


def test_training_outside_of_run(replicas: elastic.Replicas) -> None:
    net = sharded(replicas)
    HybridShard(net, replicas)
    with pytest.raises(InvalidArgumentError, match="trains before it is part of a state"):
        net(torch.ones(2, 3))


@pytest.mark.parametrize("place", ["between two layers", "reduction"])
def test_a_step_that_failed_leaves_nothing(replicas: elastic.Replicas, place: str) -> None:
    """Gradients, BatchNorm's statistics, and whole parameters."""
    net = sharded(replicas)
    model = HybridShard(net, replicas)
    state = elastic.State(step=0, model=model)
    state.sync()
    inputs = torch.randn(5, 3)

    def gradients() -> list[Any]:
        net(inputs).square().sum().backward()
        return [each.grad.to_local().clone() for each in net.parameters()]

    first, statistics = gradients(), net[1].running_mean.clone()
    model.rollback()
    assert all(each.grad is None for each in net.parameters())
    assert net[1].running_mean.tolist() == [0] * 4

    def fail(_: object) -> None:
        raise dist.PeerLostError("a rank was lost")

    if place == "reduction":
        net.set_all_reduce_hook(fail)
    else:
        hook = net[0].register_forward_hook(lambda *given: given[2].register_hook(fail) and None)
    with pytest.raises(dist.PeerLostError):
        gradients()
    if place == "reduction":
        net.set_all_reduce_hook(lambda _: None)
    else:
        hook.remove()
    model.rollback()
    again = gradients()
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert torch.equal(net[1].running_mean, statistics)


def test_a_gather_that_failed_is_not_waited_for_again(replicas: elastic.Replicas) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

    class Failed(torch.distributed.distributed_c10d.Work):  # type: ignore[misc]
        def wait(self, timeout: object = None) -> bool:
            raise dist.PeerLostError("a rank was lost")

    net = sharded(replicas)
    model = HybridShard(net, replicas)
    elastic.State(step=0, model=model).sync()
    net(torch.randn(5, 3))
    [group] = net._get_fsdp_state()._fsdp_param_groups
    nothing = torch.empty(0)
    group._all_gather_result = AllGatherResult(nothing, None, Failed(), [], [], [])
    model.rollback()
    assert group._all_gather_result is None
    net(torch.randn(5, 3)).sum().backward()
