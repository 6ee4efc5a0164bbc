"""Trains a small network by DDP and by FSDP; says how far each is from training by one process.

train.py BACKEND
"""

import copy
import sys

import torch
import torch.distributed as dist
from tests.gpu.workers import on_device as device
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

own = device.own_device()
dist.init_process_group(sys.argv[1])
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(7)
alone = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(own)
replicated = nn.parallel.DistributedDataParallel(copy.deepcopy(alone), bucket_cap_mb=0.01)
sharded, mesh = copy.deepcopy(alone), init_device_mesh(device.KIND, (ranks,))
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer, mesh=mesh)
inputs = torch.randn(8 * ranks, 16, device=own)
wanted = torch.randn(8 * ranks, 4, device=own)
mine = slice(8 * rank, 8 * rank + 8)

for model, rows in ((alone, slice(None)), (replicated, mine), (sharded, mine)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rows]), wanted[rows]).backward()
        optimizer.step()

whole = [each.full_tensor() for each in sharded.parameters()]
for way, theirs in (("ddp", list(replicated.parameters())), ("fsdp", whole)):
    with torch.no_grad():
        pairs = zip(alone.parameters(), theirs, strict=True)
        off = max(float((one - other).abs().max()) for one, other in pairs)
    dist.barrier()
    device.say("trained", rank, way, "well" if off < 1e-4 else f"off by {off}")
dist.destroy_process_group()
