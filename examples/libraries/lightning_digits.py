"""Handwritten digits with PyTorch Lightning, on Rallypoint's engine.

    rallypoint run --nproc-per-node 2 examples/libraries/lightning_digits.py

The strategy names the backend. Under a launcher, `devices` and `num_nodes` must be the numbers of
workers per node and of nodes. Needs PyTorch, pytorch-lightning and scikit-learn.
"""

from __future__ import annotations

import argparse
import os

import pytorch_lightning
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Digits(pytorch_lightning.LightningModule):  # type: ignore[misc]
    """64 pixels -> 64 hidden units (ReLU) -> 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        right = (self.layers(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)  # the mean over all workers

    def on_validation_epoch_end(self) -> None:
        accuracy = self.trainer.callback_metrics["accuracy"]
        self.print(f"epoch {self.current_epoch + 1}  test accuracy {accuracy:.4f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    pytorch_lightning.seed_everything(1, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    data = TensorDataset(images, torch.tensor(digits.target))
    train, test = random_split(data, [1437, 360])

    workers, local_workers = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=local_workers,
        num_nodes=workers // local_workers,
        strategy=DDPStrategy(process_group_backend="rallypoint"),
        max_epochs=options.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Digits(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=60)
    )
    if trainer.is_global_zero:
        print(f"{trainer.world_size} workers, backend {dist.get_backend()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
