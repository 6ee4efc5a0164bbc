"""A small GPT that learns to write Python, in the manner of nanoGPT: an ordinary torch script.

    rallypoint run --nproc-per-node 2 examples/train_gpt.py
    rallypoint run --nproc-per-node 2 examples/train_gpt.py --fsdp

Every worker holds the whole model (DistributedDataParallel), or with --fsdp a part of each layer
(fully_shard, known as FSDP2); the losses differ only by rounding. PyTorch finds the backend
"rallypoint" without an import, also under torchrun. For comparison:

    rallypoint run --nproc-per-node 2 examples/train_gpt.py --backend gloo
    rallypoint run --nproc-per-node 2 --as-gloo examples/train_gpt.py --backend gloo

The first uses PyTorch's gloo. The second shows what a script gets that asks for gloo and cannot be
edited: Rallypoint's engine again. The text is the source of Python's argparse. Needs PyTorch.
"""

from __future__ import annotations

import argparse
import inspect
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

CONTEXT = 64


class Block(nn.Module):
    """A layer of the transformer: causal attention, then a small network for each position."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_network = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_query_key_value = nn.Linear(width, 3 * width)
        self.from_heads = nn.Linear(width, width)
        self.network = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.to_query_key_value(self.before_attention(x)).split(width, dim=2)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.from_heads(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.network(self.before_network(x))


class GPT(nn.Module):
    """A transformer over characters, which tells how badly it guesses each next one."""

    def __init__(
        self, characters: int, *, width: int = 64, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, characters))

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        places = torch.arange(text.shape[1], device=text.device)
        scores = self.scores(self.blocks(self.characters(text) + self.positions(places)))
        return functional.cross_entropy(scores.flatten(0, 1), following.flatten())


def distribute(model: GPT, is_sharded: bool) -> nn.Module:
    """The model with its gradients averaged over all workers, in one of two ways."""
    if not is_sharded:
        return DistributedDataParallel(model)
    # Each block is gathered when it is needed, and dropped again; the rest goes with the whole.
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="pieces of text per step and worker")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters (fully_shard)")
    parser.add_argument("--backend", default="rallypoint", help="for init_process_group")
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    rank, workers = dist.get_rank(), dist.get_world_size()
    source = inspect.getsource(argparse)
    alphabet = {character: number for number, character in enumerate(sorted(set(source)))}
    text = torch.tensor([alphabet[character] for character in source])

    torch.manual_seed(0)
    model = distribute(GPT(len(alphabet)), options.fsdp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(rank)
    started = time.perf_counter()
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - CONTEXT - 1, (options.batch,), generator=generator)
        pieces = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        loss = model(pieces[:, :-1], pieces[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            mean = loss.detach() / workers
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}/{options.steps}  loss {mean.item():.4f}", flush=True)
    if rank == 0:
        taken_ms = (time.perf_counter() - started) / options.steps * 1000
        print(f"{taken_ms:.0f} ms per step; the process group is {dist.group.WORLD.name()}'s")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
