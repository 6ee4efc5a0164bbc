"""Handwritten digits with Hugging Face accelerate, on Rallypoint's engine.

    rallypoint run --nproc-per-node 2 examples/libraries/accelerate_digits.py

The one line that differs from any script of accelerate's is init_process_group: an Accelerator uses
the process group that it finds. `--as-gloo` after `run` does without that line. Needs PyTorch,
accelerate and scikit-learn.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    dist.init_process_group("rallypoint")
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [1437, 360])

    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network, optimizer, batches, test_batches = accelerator.prepare(
        network,
        optimizer,
        DataLoader(train, batch_size=32, shuffle=True),
        DataLoader(test, batch_size=64),
    )
    for epoch in range(1, options.epochs + 1):
        network.train()
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(network(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()

        network.eval()
        right = []
        for inputs, labels in test_batches:
            guesses = network(inputs).argmax(dim=1)
            # Without what was added so that all workers have the same number of images.
            all_guesses, all_labels = accelerator.gather_for_metrics((guesses, labels))
            right.append(all_guesses == all_labels)
        result = torch.cat(right)
        accelerator.print(
            f"epoch {epoch}/{options.epochs}  "
            f"test accuracy {result.float().mean().item():.4f} on {len(result)} images",
            flush=True,
        )
    accelerator.print(f"{accelerator.num_processes} workers, backend {dist.get_backend()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
