"""A trainer sends new weights to workers that serve the model, each in a job of its own.

    rallypoint run --nproc-per-node 2 examples/new_weights.py serve
    rallypoint run --nproc-per-node 2 examples/new_weights.py train

Start both, in any order. Each job has its default group. `form_process_group` forms a group of the
trainers' rank 0 and all servers, at an address that both jobs know. new_weights_torch.py is the
same in PyTorch.
"""

from __future__ import annotations

import sys

import numpy as np

import rallypoint as dist

SERVERS, STEPS = 2, 3
PLACE = "tcp://127.0.0.1:29610"


def form(rank: int) -> dist.ProcessGroup:
    """The group of the trainer, which is rank 0, and the servers."""
    return dist.form_process_group(
        init_method=PLACE, world_size=1 + SERVERS, rank=rank, group_name="weights"
    )


def train() -> None:
    weights = np.zeros(1_000)
    group = form(0) if dist.get_rank() == 0 else None
    for _ in range(STEPS):
        weights += dist.get_rank() + 1
        dist.all_reduce(weights, op=dist.ReduceOp.AVG)  # among the trainers
        if group is not None:
            dist.broadcast(weights, src=0, group=group)
    if group is not None:
        print(f"trainer: sent {STEPS} times, at last {weights[0]}", flush=True)
        dist.destroy_process_group(group)


def serve() -> None:
    weights = np.zeros(1_000)
    group = form(1 + dist.get_rank())
    for _ in range(STEPS):
        dist.broadcast(weights, src=0, group=group)  # 0 is the trainer, not this job's rank 0
    dist.destroy_process_group(group)
    dist.barrier()  # among the servers
    print(f"server {dist.get_rank()}: got {weights[0]}", flush=True)


if __name__ == "__main__":
    dist.init_process_group()
    {"train": train, "serve": serve}[sys.argv[1]]()
    dist.destroy_process_group()
