"""Libraries that train with PyTorch, as users call them, with gloo and then with our backend.

    rallypoint run --nproc-per-node 2 torch_libraries.py LIBRARY RESULTS.json

Both in one process, as importing them takes longest. Rank 0 writes down losses. accelerate, and
transformers by way of it, choose gloo by themselves on CPUs, unless there is a group already.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS = 8
OURS = "rallypoint"


def data() -> Any:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(16 * STEPS, 8, generator=generator),
        torch.randn(16 * STEPS, 4, generator=generator),
    )


def model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def accelerate(backend: str) -> list[float]:
    """A training, then with ours its own script of tests, which ends with the end of the group."""
    dist.init_process_group(backend)
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.test_utils.scripts import test_script

    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    assert dist.get_backend() == backend
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    own, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(data(), batch_size=8))
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(own(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    if backend == OURS:
        test_script.main()
    return losses


def lightning(backend: str) -> list[float]:
    """A LightningModule with DDP."""
    import pytorch_lightning
    from pytorch_lightning.strategies import DDPStrategy

    losses: list[float] = []

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = model()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
            losses.append(float(self.all_gather(loss.detach()).mean()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pytorch_lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=8))
    assert dist.get_backend() == backend
    return losses


def transformers(backend: str) -> list[float]:
    """Trainer, with a tiny random model of language."""
    dist.init_process_group(backend)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 64, (16 * STEPS, 16), generator=generator)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir=os.environ.get("TMPDIR", "."),
            use_cpu=True,
            per_device_train_batch_size=8,
            num_train_epochs=1,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=5,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    )
    trainer.train()
    assert dist.get_backend() == backend
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def main() -> None:
    library, path = sys.argv[1:]
    del sys.argv[1:]  # accelerate's script reads them
    train = {"accelerate": accelerate, "lightning": lightning, "transformers": transformers}[
        library
    ]
    losses = {}
    for backend in ("gloo", OURS):
        losses[backend] = train(backend)
        if dist.is_initialized():
            dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
