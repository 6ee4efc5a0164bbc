"""Pipeline parallelism: each worker holds some layers of a network, and passes activations on.

    rallypoint run --nproc-per-node 2 examples/train_pipeline.py

torch.distributed.pipelining cuts each batch into microbatches, so that the workers compute at the
same time, and sends activations forward and gradients back over the backend "rallypoint". The
losses are those of one worker with all the layers (--nproc-per-node 1), except for rounding.
Needs PyTorch and scikit-learn.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("train_pipeline.py needs scikit-learn: pip install scikit-learn")


def all_layers() -> list[nn.Module]:
    """The whole network, the same in each worker: 64 pixels -> 10 classes."""
    torch.manual_seed(1)
    hidden = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)]
    return [*hidden, nn.Linear(64, 10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64, help="images per step")
    parser.add_argument("--microbatches", type=int, default=4, help="per step")
    options = parser.parse_args()

    dist.init_process_group("rallypoint")
    rank, workers = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target)

    layers = all_layers()
    per_worker = -(-len(layers) // workers)
    own = nn.Sequential(*layers[rank * per_worker : (rank + 1) * per_worker])
    stage = PipelineStage(own, rank, workers, torch.device("cpu"))
    schedule = Schedule1F1B(stage, options.microbatches, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    order = torch.Generator().manual_seed(2)
    for epoch in range(1, options.epochs + 1):
        total, steps = 0.0, 0
        # Whole batches only: the stages have agreed on the shapes that they pass on.
        for chosen in torch.randperm(1437, generator=order).split(options.batch)[:-1]:
            losses: list[torch.Tensor] = []
            optimizer.zero_grad()
            schedule.step(
                *([images[chosen]] if stage.is_first else []),
                target=labels[chosen] if stage.is_last else None,
                losses=losses if stage.is_last else None,
            )
            optimizer.step()
            if stage.is_last:
                total += torch.stack(losses).mean().item()
                steps += 1
        if stage.is_last:
            print(f"epoch {epoch}/{options.epochs}  loss {total / steps:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
