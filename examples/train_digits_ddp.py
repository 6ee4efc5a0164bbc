"""Handwritten digits with PyTorch's DistributedDataParallel: an ordinary torch script.

    rallypoint run --standalone --nproc-per-node 2 examples/train_digits_ddp.py
    torchrun       --standalone --nproc-per-node 2 examples/train_digits_ddp.py

It knows nothing of Rallypoint and gives the same losses under either launcher. Needs PyTorch and
scikit-learn.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("train_digits_ddp.py needs scikit-learn: pip install scikit-learn")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="images per step and worker")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(1)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.tensor(digits.data[order] / 16.0, dtype=torch.float64)
    labels = torch.tensor(digits.target[order])
    train, test = TensorDataset(images[:1437], labels[:1437]), (images[1437:], labels[1437:])

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(train, seed=1, drop_last=True)
    loader = DataLoader(train, batch_size=options.batch, sampler=sampler, drop_last=True)
    losses = []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(1, dtype=torch.float64)
        for batch_images, batch_labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(batch_images), batch_labels)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total)
        if dist.get_rank() == 0:
            mean = total.item() / len(loader) / dist.get_world_size()
            print(f"epoch {epoch + 1}/{options.epochs}  loss {mean:.12f}", flush=True)
    if dist.get_rank() == 0:
        accuracy = (model(test[0]).argmax(dim=1) == test[1]).double().mean().item()
        print(f"test accuracy {accuracy:.4f}")
    # torch aborts if a thread of gloo's is the last to let go of a tensor at the very end.
    dist.barrier()
    losses.clear()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
