"""A script as users have it: small trainings with PyTorch's distributed features, one by one.

    rallypoint run --nproc-per-node 2 torch_features.py BACKEND RESULTS.json [FEATURE ...]

Each returns numbers, losses in most cases, that depend on what the ranks exchanged; rank 0 writes
them down. Nothing here knows which backend it runs on.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's custom
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Feature = Callable[[], list[float]]
features: dict[str, Feature] = {}
STEPS = 4


def feature(function: Feature) -> Feature:
    features[function.__name__] = function
    return function


def model(width: int = 32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / int(dist.get_world_size())


def train(wrapped: Any, optimizer: Any = None, steps: int = STEPS) -> list[float]:
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    return losses


@feature
def ddp() -> list[float]:
    return train(DistributedDataParallel(model()))


@feature
def ddp_bucket_views() -> list[float]:
    return train(
        DistributedDataParallel(model(), gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    )


@feature
def ddp_static_graph() -> list[float]:
    return train(DistributedDataParallel(model(), static_graph=True))


@feature
def ddp_no_sync() -> list[float]:
    wrapped = DistributedDataParallel(model())
    with wrapped.no_sync():
        F.mse_loss(wrapped(batch(7)[0]), batch(7)[1]).backward()
    return train(wrapped)


@feature
def ddp_unused_parameters() -> list[float]:
    class Sometimes(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.always, self.seldom = model(), model()

        def forward(self, inputs: torch.Tensor) -> Any:
            result = self.always(inputs)
            return result + self.seldom(inputs) if dist.get_rank() == 0 else result

    return train(DistributedDataParallel(Sometimes(), find_unused_parameters=True))


@feature
def ddp_join() -> list[float]:
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            F.mse_loss(wrapped(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
    return train(wrapped)


@feature
def ddp_builtin_hooks() -> list[float]:
    losses = []
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        wrapped = DistributedDataParallel(model())
        wrapped._register_builtin_comm_hook(kind)
        losses += train(wrapped)
    return losses


@feature
def ddp_python_hooks() -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    losses = []
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        wrapped = DistributedDataParallel(model())
        wrapped.register_comm_hook(None, hook)
        losses += train(wrapped)
    return losses


@feature
def ddp_power_sgd() -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    wrapped = DistributedDataParallel(model(64))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(wrapped, steps=6)


@feature
def ddp_sparse() -> list[float]:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(
        nn.Sequential(nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 4))
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        loss = wrapped(torch.randint(0, 50, (16, 3), generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    return losses


@feature
def zero_redundancy() -> list[float]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    losses = train(wrapped, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return losses


@feature
def fsdp1() -> list[float]:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    losses = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        wrapped = FullyShardedDataParallel(
            model(), sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        losses += train(wrapped)
    return losses


@feature
def fsdp2() -> list[float]:
    from torch.distributed.fsdp import fully_shard

    wrapped = model()
    for layer in wrapped:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(wrapped)
    return train(wrapped)


@feature
def fsdp2_hybrid_mesh() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    losses = []
    for shape in ((1, dist.get_world_size()), (dist.get_world_size(), 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        wrapped = fully_shard(model(), mesh=mesh, mp_policy=policy)
        losses += train(wrapped)
    return losses


@feature
def tensor_parallel() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrapped = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, foreach=False)
    losses = []
    for step in range(STEPS):
        inputs, targets = batch(step, rank=0)
        optimizer.zero_grad()
        loss = F.mse_loss(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@feature
def dtensor() -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(30.0).reshape(5, 6)  # does not divide evenly
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    other = sharded.redistribute(mesh, [Shard(1)])
    back = (other @ other.t()).redistribute(mesh, [Replicate()])
    return [float(back.to_local().sum()), float(sharded.full_tensor().norm())]


@feature
def checkpoint() -> list[float]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    places: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(places)
    wrapped = fully_shard(model())
    train(wrapped)
    dcp.save({"model": wrapped.state_dict()}, checkpoint_id=f"{places[0]}/one")
    dcp.async_save({"model": wrapped.state_dict()}, checkpoint_id=f"{places[0]}/two").result()
    other = fully_shard(model())
    for name in ("one", "two"):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=f"{places[0]}/{name}")
        other.load_state_dict(state["model"])
    return train(other)


@feature
def pipeline() -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    losses: list[float] = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for kind in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(size)]
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        schedule = kind(stage, n_microbatches=4, loss_fn=F.mse_loss)
        optimizer = torch.optim.SGD(layers[rank].parameters(), lr=0.1)
        for step in range(STEPS):
            inputs, _ = batch(step, rank=0)
            optimizer.zero_grad()
            found: list[torch.Tensor] = []
            if rank == 0:
                schedule.step(inputs, **({"target": inputs, "losses": found} if size == 1 else {}))
            elif rank == size - 1:
                schedule.step(target=inputs, losses=found)
            else:
                schedule.step()
            optimizer.step()
            total = torch.tensor([float(sum(found)) if found else 0.0])
            dist.all_reduce(total)
            losses.append(float(total))
    return losses


@feature
def compiled() -> list[float]:
    from torch.distributed import _functional_collectives as functional

    def step(values: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(values * 2, "sum", list(range(dist.get_world_size())))
        parts = functional.all_gather_tensor(total + dist.get_rank(), 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(parts * 3, "sum", 0, dist.group.WORLD)

    values = torch.arange(6.0) + dist.get_rank()
    compiled_step = torch.compile(step, backend="aot_eager", fullgraph=True)
    results = [mean(step(values).sum()), mean(compiled_step(values).sum())]

    def exchange(values: torch.Tensor) -> torch.Tensor:
        peer, theirs = 1 - dist.get_rank(), torch.zeros_like(values)
        ours = values * 2
        calls = [dist.P2POp(dist.isend, ours, peer), dist.P2POp(dist.irecv, theirs, peer)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        return theirs + 1

    results.append(mean(torch.compile(exchange, backend="aot_eager")(values).sum()))
    wrapped = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    return results + train(wrapped)


@feature
def data_loader() -> list[float]:
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    inputs, targets = batch(0, rank=0)
    data = TensorDataset(inputs, targets)
    sampler = DistributedSampler(data, shuffle=True, seed=1)
    wrapped = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for some, wanted in DataLoader(data, batch_size=4, sampler=sampler, num_workers=2):
            optimizer.zero_grad()
            loss = F.mse_loss(wrapped(some), wanted)
            loss.backward()
            optimizer.step()
            losses.append(mean(loss))
    return losses


@feature
def sync_of_everything_else() -> list[float]:
    """Objects, subgroups, messages: what libraries do beside tensors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (10 + 1000 * rank)})
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [[r, "a"] for r in range(size)] if rank == 0 else None)
    evens = dist.new_group(list(range(0, size, 2)))
    value = torch.tensor([rank + 1.0])
    if rank % 2 == 0:
        dist.all_reduce(value, group=evens)
    towards, back = torch.full((100_000,), float(rank)), torch.empty(100_000)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, towards, (rank + 1) % size),
            dist.P2POp(dist.irecv, back, (rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    numbers = [len(each["text"]) for each in gathered] + [scattered[0][0], float(back.mean())]
    return [float(number) for number in [*numbers, float(value)]]


def main() -> None:
    backend, path, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    results: dict[str, Any] = {}
    for name in names or features:
        try:
            results[name] = features[name]()
        except Exception:
            results[name] = traceback.format_exc()
        print(name, results[name], flush=True)
        dist.barrier()
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(results))
    dist.destroy_process_group()
    if backend == "gloo":
        os._exit(0)  # else one of its threads may abort the process (pytorch/pytorch#190489)


if __name__ == "__main__":
    main()
