"""Training that continues from its last snapshot when a worker is lost: PyTorch, as under torchrun.

    rallypoint run --nproc-per-node 2 --max-restarts 3 \\
        examples/train_digits_snapshot.py --snapshot digits.pt

Rank 0 writes a snapshot after each epoch. Kill a worker: the launcher ends the others and starts
all again, and each loads the snapshot and continues with the next epoch. If you start the script
again after its end, it has nothing left to do; with larger --epochs it continues. To see a restart
without looking for a process to kill, have one of the workers kill itself:

    rallypoint run --nproc-per-node 2 --max-restarts 3 \\
        examples/train_digits_snapshot.py --snapshot digits.pt --kill-in-epoch 4

An epoch depends only on its number and the state, so the losses are those of a run without a
failure. For nodes that join and leave, see train_digits_elastic.py. Needs PyTorch and scikit-learn.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

try:
    from sklearn.datasets import load_digits
except ImportError:
    sys.exit("train_digits_snapshot.py needs scikit-learn: pip install scikit-learn")


class Trainer:
    """The model and all else that a snapshot must hold: the optimizer and the number of epochs."""

    def __init__(self, snapshot: Path, images: torch.Tensor, labels: torch.Tensor) -> None:
        torch.manual_seed(1)
        self.snapshot = snapshot
        self.network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1, momentum=0.9)
        self.epochs_done = 0
        if snapshot.exists():
            self._load()
        self.parallel = DistributedDataParallel(self.network)
        data = TensorDataset(images, labels)
        self.sampler = DistributedSampler(data, seed=1, drop_last=True)
        self.loader = DataLoader(data, batch_size=32, sampler=self.sampler, drop_last=True)

    def _load(self) -> None:
        saved = torch.load(self.snapshot, weights_only=True)
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epochs_done = saved["epochs_done"]

    def save(self) -> None:
        """Write next to the old snapshot, then rename: a reader finds one complete snapshot."""
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epochs_done": self.epochs_done,
        }
        part = self.snapshot.with_name(f".{self.snapshot.name}.{os.getpid()}")
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.snapshot)

    def run_epoch(self, *, kill: bool = False) -> float:
        """Train for one epoch; the mean loss over all workers.

        With `kill` this worker ends in the middle, as if the machine had no memory left.
        """
        self.sampler.set_epoch(self.epochs_done)
        total = torch.zeros(1)
        for step, (images, labels) in enumerate(self.loader):
            if kill and step == len(self.loader) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.parallel(images), labels)
            loss.backward()
            self.optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        self.epochs_done += 1
        mean: float = total.item() / len(self.loader) / dist.get_world_size()
        return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--snapshot", type=Path, required=True, help="a file all workers can read")
    parser.add_argument("--epochs", type=int, default=10, help="of all runs together")
    parser.add_argument("--kill-in-epoch", type=int, metavar="N", help="kill the last rank, once")
    options = parser.parse_args()

    dist.init_process_group("rallypoint")
    rank = dist.get_rank()
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32)
    labels = torch.tensor(digits.target[order])

    trainer = Trainer(options.snapshot, images[:1437], labels[:1437])
    if rank == 0:
        print(f"begin after {trainer.epochs_done} epochs", flush=True)
    is_first_round = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    is_last_rank = rank == dist.get_world_size() - 1
    while trainer.epochs_done < options.epochs:
        epoch = trainer.epochs_done + 1
        kill = epoch == options.kill_in_epoch and is_first_round and is_last_rank
        loss = trainer.run_epoch(kill=kill)
        if rank == 0:
            trainer.save()
            print(f"epoch {epoch}/{options.epochs}  loss {loss:.6f}", flush=True)
    if rank == 0:
        guesses = trainer.network(images[1437:]).argmax(dim=1)
        accuracy = (guesses == labels[1437:]).float().mean().item()
        print(f"test accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
