"""A worker that trains with elastic DistributedDataParallel or HybridShard, and dies as told.

    rallypoint run ... torch_elastic.py DIRECTORY KIND STEPS [STEP:RANK:PLACE ...]

Kinds: "options": BatchNorm, a layer that some ranks do not use in some steps, gradients that are
views of buckets, and two backward passes for each update; "shares": the options' defaults, and
shares of the same batch, of different sizes; "sharded": as that, in two shards; "replaced": as
that, with larger layers, and only by as many ranks as at first. Each rank writes, after each
update, a line of JSON with the step, its process, and the bits of its part of the model. None dies
before TEST_PROCESSES processes are here, spares among them. The model is on the GPU if
GPU_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import rallypoint as dist
from rallypoint import elastic
from rallypoint.pytorch.elastic import DistributedDataParallel, HybridShard, shard_mesh

sys.path.append(str(Path(__file__).parents[2]))

from tests.system.transfer_bytes import TransferBytes

FEATURES, CLASSES, SAMPLES, BATCH = 8, 3, 50, 23
PLACES = ("forward", "first bucket", "last bucket", "after backward", "update", "after update")


class Network(nn.Module):  # type: ignore[misc]
    """Three layers; the one in the middle can be left out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        width = 256 if kind == "replaced" else 32
        self.first = nn.Linear(FEATURES, width)
        self.between = nn.BatchNorm1d(width) if kind == "options" else nn.Identity()
        self.middle = nn.Linear(width, width)
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor, *, uses_middle: bool = True) -> torch.Tensor:
        x = torch.tanh(self.between(self.first(x)))
        if uses_middle:
            x = x + torch.tanh(self.middle(x))
        scores: torch.Tensor = self.last(x)
        return scores


class Deaths:
    """Where this process is to die: each of the given places once, whoever has the rank then."""

    def __init__(self, directory: Path, words: list[str]) -> None:
        self._directory = directory
        told = [word.split(":") for word in words]
        self._places = {(int(step), int(rank), place) for step, rank, place in told}
        self._processes = int(os.environ.get("TEST_PROCESSES", "0"))
        self.step = -1

    def at(self, place: str) -> None:
        rank = dist.get_rank()
        if (self.step, rank, place) not in self._places:
            return
        with contextlib.suppress(FileExistsError):
            (self._directory / f"died-{self.step}-{rank}").touch(exist_ok=False)
            while len(list(self._directory.glob("here-*"))) < self._processes:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, network: Network) -> None:
        """In forward, and when the first and the last gradient of a backward pass are there."""
        network.last.register_forward_pre_hook(lambda *_: self.at("forward"))
        network.last.bias.register_post_accumulate_grad_hook(lambda _: self.at("first bucket"))
        network.first.weight.register_post_accumulate_grad_hook(lambda _: self.at("last bucket"))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    draw = numpy.random.default_rng(0)
    inputs = torch.tensor(draw.standard_normal((SAMPLES, FEATURES)))
    return inputs, torch.tensor(draw.integers(0, CLASSES, SAMPLES))


def batches(kind: str, step: int, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a rank trains with in a step; nothing else decides on it."""
    inputs, labels = samples()
    draw = numpy.random.default_rng((step, rank))
    for _ in range(2 if kind == "options" else 1):
        some = draw.integers(0, SAMPLES, 8)
        mine = some if kind == "options" else elastic.Sampler(SAMPLES, BATCH).indices(step)
        yield inputs[mine], labels[mine]


def loss_of(
    model: Any, kind: str, step: int, rank: int, part: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    inputs, labels = part
    if kind == "options":
        scores = model(inputs, uses_middle=(step + rank) % 3 > 0)
        return functional.cross_entropy(scores, labels)
    return functional.cross_entropy(model(inputs), labels, reduction="sum") / BATCH


def bits(model: Any) -> str:
    """Of this rank's part."""
    return bits_of(getattr(each, "_local_tensor", each) for each in model.state_dict().values())


def bits_of(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in tensors)).hexdigest()


def own_device() -> torch.device:
    """This rank's; ranks share GPUs where there are too few."""
    if os.environ.get("GPU_TEST_DEVICE", "cpu") == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())


def main() -> None:
    directory, kind, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    deaths = Deaths(directory, sys.argv[4:])
    torch.set_num_threads(1)
    counted = TransferBytes()
    (directory / f"here-{os.getpid()}").touch()
    dist.init_process_group()
    own = own_device()
    torch.manual_seed(0)
    network = Network(kind).double().to(own)
    has_options = kind == "options"
    replicas = elastic.Replicas(2) if kind in ("sharded", "replaced") else None
    model: Any
    if replicas is not None:
        mesh = shard_mesh(replicas)
        for layer in (network.middle, network.last, network):
            fully_shard(layer, mesh=mesh)
        model = HybridShard(network, replicas, average=False)
    else:
        model = DistributedDataParallel(
            network,
            average=has_options,
            bucket_cap_mb=0.001,  # several
            find_unused_parameters=has_options,
            gradient_as_bucket_view=has_options,
        )
    deaths.watch(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    state = elastic.State(step=0, model=model, optimizer=optimizer, schedule=schedule)
    log = (directory / f"{kind}-{os.getpid()}.jsonl").open("a")

    # With fewer ranks than at first, these wait for a spare.
    @elastic.run(min_size={"options": 2, "replaced": 4}.get(kind, 1))
    def train(state: Any) -> None:
        while state.step < steps:
            deaths.step = state.step
            optimizer.zero_grad()
            rank = dist.get_rank()
            parts = list(batches(kind, state.step, rank))
            total = torch.zeros((), dtype=torch.float64)
            for number, part in enumerate(parts):
                is_last = number == len(parts) - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    inputs, labels = (each.to(own) for each in part)
                    loss = loss_of(model, kind, state.step, rank, (inputs, labels))
                    loss.backward()
                total += loss.detach().cpu()
            deaths.at("after backward")
            if replicas is not None:
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1e9)  # communicates as well
            dist.all_reduce(total, group=None if replicas is None else replicas.group)
            with state.update():
                deaths.at("update")
                optimizer.step()
                schedule.step()
                state.step += 1
                told = {"step": state.step, "bits": bits(network), "loss": total.item()}
                told |= {"pid": os.getpid(), "size": dist.get_world_size()}
                told |= {"shard": 0 if replicas is None else replicas.shard}
                told |= {"received": counted.received, "own": counted.own}
                log.write(json.dumps(told) + "\n")
                log.flush()
            deaths.at("after update")

    train(state)


if __name__ == "__main__":
    main()
