"""A trainer sends new weights to workers that serve the model, in PyTorch, each in its own job.

    rallypoint run --nproc-per-node 2 examples/new_weights_torch.py serve
    rallypoint run --nproc-per-node 2 examples/new_weights_torch.py train

Start both, in any order. Each job has its default group. PyTorch has no public call for a group of
processes from several jobs; OpenRLHF, verl and vLLM form one with `_new_process_group_helper`, and
so does this program. With NumPy arrays, new_weights.py does the same by a public call.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _new_process_group_helper,
    _world,
    default_pg_timeout,
)

SERVERS, STEPS = 2, 3
HOST, PORT = "127.0.0.1", 29611  # of the trainer's rank 0


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


def train() -> None:
    weights = torch.zeros(1_000)
    group = form(0) if dist.get_rank() == 0 else None
    for _ in range(STEPS):
        weights += dist.get_rank() + 1
        dist.all_reduce(weights)  # among the trainers
        weights /= dist.get_world_size()
        if group is not None:
            dist.broadcast(weights, src=0, group=group)
    if group is not None:
        dist.barrier(group=group)  # others may still read in the store, which is here
        print(f"trainer: sent {STEPS} times, at last {weights[0]}", flush=True)


def serve() -> None:
    weights = torch.zeros(1_000)
    group = form(1 + dist.get_rank())
    for _ in range(STEPS):
        dist.broadcast(weights, src=0, group=group)  # 0 is the trainer, not this job's rank 0
    dist.barrier(group=group)
    print(f"server {dist.get_rank()}: got {weights[0]}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("rallypoint")
    {"train": train, "serve": serve}[sys.argv[1]]()
    dist.destroy_process_group()
