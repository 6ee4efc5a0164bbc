"""A worker that trains several models at once, each with one option of DistributedDataParallel.

    rallypoint run ... torch_options.py DIRECTORY STEPS [STEP:RANK:MODEL ...]

"views" has gradients that are views of buckets, and "unused" a layer that some ranks do not use in
some steps. "scaled" has a GradScaler, and gradients that are infinite in some steps. "encoder" and
"decoder" are two models in one backward pass. A rank dies when the middle one of a model's three
layers gets its gradient, which is in a bucket between others. After each update, each rank writes a
line of JSON with the step and the bits of all models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

import rallypoint as dist
from rallypoint import elastic
from rallypoint.pytorch.elastic import DistributedDataParallel

FEATURES, BETWEEN, CLASSES, WIDTH = 8, 5, 3, 32
MODELS = ("views", "unused", "scaled", "encoder", "decoder")


class Network(nn.Module):  # type: ignore[misc]
    """Three layers; the one in the middle can be left out."""

    def __init__(self, name: str) -> None:
        super().__init__()
        inputs = BETWEEN if name == "decoder" else FEATURES
        outputs = BETWEEN if name == "encoder" else CLASSES
        self.first, self.middle = nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, outputs)

    def forward(self, x: torch.Tensor, *, uses_middle: bool = True) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if uses_middle:
            x = x + torch.tanh(self.middle(x))
        scores: torch.Tensor = self.last(x)
        return scores


def uses_middle(step: int, rank: int) -> bool:
    """Of "unused"."""
    return (step + rank) % 3 > 0


class Training:
    """Models and what changes them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.networks = {name: Network(name).double() for name in MODELS}
        others = [n for name, n in self.networks.items() if name != "scaled"]
        self.optimizer = torch.optim.AdamW([p for n in others for p in n.parameters()], lr=0.01)
        self.scaled_optimizer = torch.optim.AdamW(self.networks["scaled"].parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def losses(self, models: dict[str, Any], step: int, rank: int) -> Iterator[torch.Tensor]:
        """What a rank differentiates in a step, one after the other."""
        draw = numpy.random.default_rng((step, rank))
        inputs = torch.tensor(draw.standard_normal((8, FEATURES)))
        labels = torch.tensor(draw.integers(0, CLASSES, 8))
        yield functional.cross_entropy(models["views"](inputs), labels)
        used = uses_middle(step, rank)
        yield functional.cross_entropy(models["unused"](inputs, uses_middle=used), labels)
        loss = self.scaler.scale(functional.cross_entropy(models["scaled"](inputs), labels))
        yield loss * float("inf") if step % 7 == 3 and rank == 1 else loss
        yield functional.cross_entropy(models["decoder"](models["encoder"](inputs)), labels)

    def update(self) -> None:
        self.optimizer.step()
        self.scaler.unscale_(self.scaled_optimizer)
        nn.utils.clip_grad_norm_(self.networks["scaled"].parameters(), 0.5)
        self.scaler.step(self.scaled_optimizer)
        self.scaler.update()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.scaled_optimizer.zero_grad()

    def bits(self) -> str:
        found = hashlib.sha256(str(self.scaler.state_dict()).encode())
        for network in self.networks.values():
            for each in network.state_dict().values():
                found.update(each.numpy().tobytes())
        return found.hexdigest()


def main() -> None:
    directory, steps = Path(sys.argv[1]), int(sys.argv[2])
    deaths = {tuple(each.split(":")) for each in sys.argv[3:]}
    torch.set_num_threads(1)
    dist.init_process_group()
    training = Training()

    def die(name: str) -> None:
        death = str(state.step), str(dist.get_rank()), name
        if death in deaths:
            with contextlib.suppress(FileExistsError):
                (directory / f"died-{death[0]}-{name}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)

    models: dict[str, Any] = {}
    for name, network in training.networks.items():
        models[name] = model = DistributedDataParallel(
            network,
            bucket_cap_mb=0.001,
            gradient_as_bucket_view=name == "views",
            find_unused_parameters=name == "unused",
        )
        buckets = model.reducer._get_zeros_like_grad_buckets()
        parameters = [len(each.parameters()) for each in buckets]
        assert len(buckets) >= 3, parameters
        network.middle.weight.register_post_accumulate_grad_hook(lambda _, name=name: die(name))
    state = elastic.State(
        step=0,
        optimizer=training.optimizer,
        scaled_optimizer=training.scaled_optimizer,
        scaler=training.scaler,
        **models,
    )
    log = (directory / f"{os.getpid()}.jsonl").open("a", buffering=1)

    @elastic.run(min_size=2)
    def train(state: Any) -> None:
        while state.step < steps:
            training.zero_grad()
            for loss in training.losses(models, state.step, dist.get_rank()):
                loss.backward()
            with state.update():
                training.update()
                state.step += 1
                told = {"step": state.step, "bits": training.bits(), "size": dist.get_world_size()}
                log.write(json.dumps(told | {"pid": os.getpid()}) + "\n")

    train(state)


if __name__ == "__main__":
    main()
