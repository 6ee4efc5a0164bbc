"""Libraries that train with PyTorch, as users call them, with gloo and then on our engine.

    rallypoint run --nproc-per-node 2 torch_libraries.py named LIBRARY,... RESULTS.json
    rallypoint run --as-gloo --nproc-per-node 2 torch_libraries.py switch LIBRARY,... RESULTS.json
    rallypoint run --nproc-per-node 2 torch_libraries.py BACKEND LIBRARY,... RESULTS.json

All in one process, as importing them takes longest. First they train one after the other in a group
of PyTorch's gloo, formed once: a second one would read the first one's addresses in the store. Then
each with ours, "named": by our name; or "switch": the script names no backend and the library
chooses, which is gloo on CPUs. Rank 0 writes down the losses of both. With one BACKEND they train
once, for what keeps a group for the life of the process.
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


def form(backend: str | None) -> None:
    """The group, unless there is one or the library is to choose."""
    if backend is not None and not dist.is_initialized():
        dist.init_process_group(backend)


def accelerate(backend: str | None) -> list[float]:
    """A training, then with ours its own script of tests, which ends with the end of the group."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.test_utils.scripts import test_script

    form(backend)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    check(backend)
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    own, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(data(), batch_size=8))
    assert isinstance(own, DistributedDataParallel)
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


def lightning(backend: str | None) -> list[float]:
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
        strategy=DDPStrategy(process_group_backend=backend) if backend else "ddp",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=8))
    check(backend)
    return losses


def transformers(backend: str | None) -> list[float]:
    """Trainer, with a tiny random model of language."""
    from accelerate.state import AcceleratorState
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    form(backend)
    AcceleratorState._reset_state(reset_partial_state=True)  # Trainer's is accelerate's
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
    check(backend)
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def ignite(backend: str | None) -> list[float]:
    """auto_model, which knows gloo, nccl and mpi, and wraps in DDP for these only.

    What it must come to is computed without it.
    """
    import ignite.distributed as idist

    if backend is None:
        idist.initialize("gloo")
        own = idist.auto_model(model())
        loader = idist.auto_dataloader(data(), batch_size=16, shuffle=False)  # of both ranks
    else:
        form(backend)
        own = DistributedDataParallel(model())
        sampler = DistributedSampler(data(), shuffle=False)
        loader = DataLoader(data(), batch_size=8, sampler=sampler)
    check(backend)
    assert isinstance(own, DistributedDataParallel)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    losses = []
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(own(inputs), targets)
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss) if backend else idist.all_reduce(loss)
        losses.append(float(loss))
    if backend is None:
        idist.finalize()
    return losses


def torchmetrics(backend: str | None) -> list[float]:
    """A metric of all ranks' samples, and one that gathers a different number from each."""
    from torchmetrics import CatMetric, MeanSquaredError

    form(backend or "gloo")
    check(backend)
    own, error, seen = model(), MeanSquaredError(), CatMetric()
    results = []
    loader = DataLoader(data(), batch_size=8, sampler=DistributedSampler(data(), shuffle=False))
    for inputs, targets in loader:
        error.update(own(inputs).detach(), targets)
        seen.update(inputs[: 1 + dist.get_rank()].sum(1))
        results.append(float(error.compute()))
    return [*results, *seen.compute().tolist()]


def deepspeed(backend: str | None) -> list[float]:
    """ZeRO 1 to 3."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend=backend or "gloo")
    check(backend)
    losses = []
    for stage in (1, 2, 3):
        own = model()
        engine, *_ = deepspeed.initialize(
            model=own,
            model_parameters=own.parameters(),
            config={
                "train_micro_batch_size_per_gpu": 8,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,
            },
        )
        sampler = DistributedSampler(data(), shuffle=False)
        for inputs, targets in DataLoader(data(), batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
    return losses


def check(backend: str | None) -> None:
    """The group is of the backend that was asked for; by the switch, of ours."""
    assert dist.get_backend() == (backend or "gloo")
    is_ours = dist.group.WORLD.name() == OURS
    assert is_ours == (backend in (OURS, None)), dist.group.WORLD.name()


LIBRARIES = {
    each.__name__: each
    for each in (accelerate, lightning, transformers, ignite, torchmetrics, deepspeed)
}
BACKENDS: dict[str, tuple[str | None, ...]] = {
    "named": ("gloo", OURS),
    "switch": ("torch_gloo", None),
    "gloo": ("gloo",),
    OURS: (OURS,),
}


def main() -> None:
    how, libraries, path = sys.argv[1:]
    del sys.argv[1:]  # accelerate's script reads them
    names = libraries.split(",")
    results: dict[str, list[list[float]]] = {name: [] for name in names}
    for backend in BACKENDS[how]:
        is_gloo = backend in ("gloo", "torch_gloo")
        for name in names:
            if is_gloo:
                form(backend)
            print(f"{name} with {backend}", file=sys.stderr)
            results[name].append(LIBRARIES[name](backend))
            if dist.is_initialized() and (not is_gloo or name == names[-1]):
                dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
