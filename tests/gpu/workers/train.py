"""Trains a small network by DDP or FSDP; says how far it is from training by one process.

train.py ddp|fsdp BACKEND
"""

import copy
import sys

import torch
import torch.distributed as dist
from tests.gpu.workers import on_device as device
from torch import nn

way, backend = sys.argv[1:]
own = device.own_device()
dist.init_process_group(backend)
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(7)
alone = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(own)
network = copy.deepcopy(alone)
inputs = torch.randn(8 * ranks, 16, device=own)
wanted = torch.randn(8 * ranks, 4, device=own)
mine = slice(8 * rank, 8 * rank + 8)
if way == "ddp":
    network = nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.01)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.KIND, (ranks,))
    for layer in (network[0], network[2], network):
        fully_shard(layer, mesh=mesh)

for model, rows in ((alone, slice(None)), (network, mine)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), wanted[rows]).backward()
        optimizer.step()

theirs = [each.full_tensor() if way == "fsdp" else each for each in network.parameters()]
with torch.no_grad():
    pairs = zip(alone.parameters(), theirs, strict=True)
    off = max(float((one - other).abs().max()) for one, other in pairs)
dist.barrier()
device.say("trained", rank, "well" if off < 1e-4 else f"off by {off}")
dist.destroy_process_group()
