"""A trainer sends new weights to workers that serve the model, in PyTorch, each in its own job.

    rallypoint run --nproc-per-node 2 examples/new_weights_torch.py serve
    rallypoint run --nproc-per-node 2 examples/new_weights_torch.py train

Start both, in any order. Each job has its default group. PyTorch has no public call for a group of
processes from several jobs; OpenRLHF, verl and vLLM form one with `_new_process_group_helper`, and
so does this program. As there, small tensors travel together, in flattened buckets.

The jobs may share a GPU: with RALLYPOINT_DEVICE_MEMORY=1 in both, weights stay in its memory. With
NumPy arrays, new_weights.py does the same by a public call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
)

SERVERS, STEPS = 2, 3
HOST, PORT = "127.0.0.1", 29611  # of the trainer's rank 0
BUCKET_BYTES = 256 << 20
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def form(rank: int) -> dist.ProcessGroup:
    """The group of the trainer, which is rank 0, and the servers."""
    size, timeout = 1 + SERVERS, default_pg_timeout
    # Not rendezvous("tcp://..."): under a launcher it expects the launcher to serve the store.
    store = PrefixStore("weights", dist.TCPStore(HOST, PORT, size, rank == 0, timeout))
    group, _ = _new_process_group_helper(
        size, rank, [], Backend("rallypoint"), store, group_name="weights", timeout=timeout
    )
    _world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def buckets(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The tensors in lists, each of one dtype and, unless it is a single tensor, BUCKET_BYTES."""
    lists: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = lists.setdefault(tensor.dtype, [])
        if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = lists[tensor.dtype] = []
        bucket.append(tensor)
    yield from lists.values()


def update(weights: Iterable[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Give all ranks of the group the weights of its rank 0, in few calls."""
    for bucket in buckets(weights):
        flat = _flatten_dense_tensors(bucket)
        dist.broadcast(flat, src=0, group=group)
        is_copy = flat.data_ptr() != bucket[0].data_ptr()  # a single tensor is sent as it is
        if is_copy and group.rank() > 0:
            for tensor, part in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                tensor.copy_(part)


def new_model() -> torch.nn.Module:
    layers = [torch.nn.Linear(100, 100) for _ in range(10)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(100)).to(DEVICE)


def train() -> None:
    model = new_model()
    weights = [each.detach() for each in model.parameters()]
    for each in weights:
        each.zero_()
    group = form(0) if dist.get_rank() == 0 else None
    for _ in range(STEPS):
        for each in weights:
            each.add_(dist.get_rank() + 1)
            dist.all_reduce(each, dist.ReduceOp.AVG)  # among the trainers
        if group is not None:
            update(model.state_dict().values(), group)
    if group is not None:
        dist.barrier(group=group)  # others may still read in the store, which is here
        print(f"trainer: sent {STEPS} times, at last {weights[0][0, 0]}", flush=True)


def serve() -> None:
    model = new_model()
    group = form(1 + dist.get_rank())
    for _ in range(STEPS):  # from the group's rank 0, which is the trainer, not this job's
        update(model.state_dict().values(), group)
    dist.barrier(group=group)
    values = torch.cat([each.detach().reshape(-1) for each in model.parameters()]).unique()
    print(f"server {dist.get_rank()}: got {values.tolist()}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("rallypoint")
    {"train": train, "serve": serve}[sys.argv[1]]()
    dist.destroy_process_group()
