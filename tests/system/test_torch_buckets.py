"""DDP's gradients in memory that ranks share are, to the bit, those in private memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import Launch

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]

SCRIPT = """
import gc, hashlib, json, os, re, sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rallypoint.pytorch import ddp_comm_hook

torch.set_num_threads(1)
dist.init_process_group("rallypoint")
rank = dist.get_rank()
pair = dist.new_group([0, 1])

def train(group, views, unused):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(600, 600) for _ in range(4)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers), process_group=group, gradient_as_bucket_view=views,
        bucket_cap_mb=2, find_unused_parameters=unused)
    model.register_comm_hook((group, None), ddp_comm_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    digest = hashlib.sha256()
    for _ in range(4):  # in the second step, buckets are built anew
        model(torch.randn(4, 600, generator=generator)).square().mean().backward()
        optimizer.step()
        for parameter in model.parameters():
            digest.update(parameter.grad.numpy().tobytes() if not views else
                          bytes(parameter.grad.clone().numpy()))
        optimizer.zero_grad(set_to_none=not views)
    return digest.hexdigest()

def shared_kib():
    sizes, counts = 0, False
    for line in open("/proc/self/smaps"):
        if "-" in line.split(" ", 1)[0]:
            counts = "/dev/shm/torch_" in line
        elif counts and line.startswith("Rss:"):
            sizes += int(line.split()[1])
    return sizes

told, held = [], []
for group in (dist.group.WORLD, pair):
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        continue
    for views in (False, True):
        told.append(train(group, views, unused=views))
        gc.collect()
        held.append(shared_kib())
dist.destroy_process_group()
del group, pair
gc.collect()
held.append(shared_kib())
json.dump([told, held], open(f"{sys.argv[1]}.{rank}", "w"))
"""


def train(launch: Launch, ranks: int, name: str) -> list[Any]:
    script = launch.script(SCRIPT)
    assert launch.run("--nproc-per-node", str(ranks), script, name) == 0, launch.err
    return [
        json.loads(Path(launch.directory, f"{name}.{rank}").read_text()) for rank in range(ranks)
    ]


@pytest.mark.exact
def test_gradients_are_the_same(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all three ranks, and with two of them."""
    ranks = 3
    shared = train(launch, ranks, "shared")
    monkeypatch.setenv("RALLYPOINT_DIRECT", "0")
    private = train(launch, ranks, "private")
    assert [told for told, _ in shared] == [told for told, _ in private]
    a_model_kib = 4 * 600 * 600 * 4 // 1024
    for (_, held), (_, in_private) in zip(shared, private, strict=True):
        assert not any(in_private)
        assert held[0] > a_model_kib * ranks / 2  # its own, and what it read of the others'
        # Models come and go; what they leave behind does not add up.
        assert max(held) < 3 * ranks * a_model_kib, held
        assert held[-1] == 0
