"""The GPT of train_gpt.py, in training that continues in the same processes when a worker is lost.

    rallypoint run --nproc-per-node 3 --max-restarts 10 examples/train_gpt_elastic.py --kill-at 30
    rallypoint run --nproc-per-node 3 --max-restarts 10 --spares 1 \
        examples/train_gpt_elastic.py --kill-at 30

In step 30, rank 1 kills itself. In the first job, the other two retry the step and share the batch.
In the second job, a spare takes over, with the model from the memory of the others. The losses are
the same except for rounding, and in the second job to the last bit.

    rallypoint run --nproc-per-node 4 --max-restarts 10 --spares 1 \
        examples/train_gpt_elastic.py --kill-at 30 --shards 2

Two replicas share the batch, each of which holds the model in two shards (fully_shard). The
replacement gets the lost rank's shard.

With --device cuda, and without shards, the model is on GPUs: that of each worker's LOCAL_RANK, or a
shared one where there are fewer. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import inspect
import os
import signal
import time

import torch
from torch.distributed.fsdp import fully_shard
from train_gpt import CONTEXT, GPT

import rallypoint as dist
from rallypoint import elastic
from rallypoint.pytorch.elastic import DistributedDataParallel, HybridShard, shard_mesh


def own_device(kind: str) -> torch.device:
    """A spare asks once it has a place: LOCAL_RANK is then the lost worker's."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=48, help="pieces of text per step, in all")
    parser.add_argument("--shards", type=int, default=1, help="of the model, in each replica")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kill-at", type=int, default=0, metavar="STEP", help="kill rank 1 there")
    options = parser.parse_args()

    dist.init_process_group()  # a spare waits here
    device = own_device(options.device)
    source = inspect.getsource(argparse)
    alphabet = {character: number for number, character in enumerate(sorted(set(source)))}
    text = torch.tensor([alphabet[character] for character in source], device=device)

    torch.manual_seed(0)
    net = GPT(len(alphabet)).to(device)
    replicas = elastic.Replicas(options.shards)
    model: DistributedDataParallel | HybridShard
    if options.shards == 1:
        model = DistributedDataParallel(net, average=False)
    else:
        mesh = shard_mesh(replicas)
        for block in net.blocks:
            fully_shard(block, mesh=mesh)
        model = HybridShard(fully_shard(net, mesh=mesh), replicas, average=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    sampler = elastic.Sampler(len(text) - CONTEXT - 1, options.batch)
    state = elastic.State(step=0, model=model, optimizer=optimizer)

    @elastic.run
    def train(state: elastic.State) -> None:
        started, first = time.perf_counter(), state.step
        print(
            f"rank {dist.get_rank()} of {dist.get_world_size()}, process {os.getpid()}: "
            f"{state.step} steps done",
            flush=True,
        )
        while state.step < options.steps:
            starts = sampler.indices(state.step)  # this rank's share of the step's batch
            pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
            # The gradients are summed, so each rank counts by its share.
            share = len(starts) / options.batch
            loss = model(pieces[:, :-1], pieces[:, 1:]) * share
            optimizer.zero_grad()
            loss.backward()
            is_first_round = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if state.step + 1 == options.kill_at and replicas.rank == 1 and is_first_round:
                os.kill(os.getpid(), signal.SIGKILL)
            mean = loss.detach().cpu()
            dist.all_reduce(mean, group=replicas.group)  # of all that train
            with state.update():  # on all ranks or on none
                optimizer.step()
                state.step += 1
            if state.step % 20 == 0 and replicas.rank == 0:
                taken_ms = (time.perf_counter() - started) / (state.step - first) * 1000
                print(
                    f"step {state.step}/{options.steps}  loss {mean.item():.4f}  "
                    f"{taken_ms:.0f} ms per step",
                    flush=True,
                )

    train(state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
