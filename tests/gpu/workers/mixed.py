"""Several groups and kinds of tensors in one program: ours, another backend's, CPU and device.

mixed.py OTHER
"""

import sys

import torch
import torch.distributed as dist
from tests.gpu.workers import on_device as device

other = sys.argv[1]
own = device.own_device()
dist.init_process_group("rallypoint")
rank, ranks = dist.get_rank(), dist.get_world_size()
groups = [dist.group.WORLD, dist.new_group(backend="gloo"), dist.new_group(backend="rallypoint")]
alone = [dist.new_group([peer], backend=other) for peer in range(ranks)]
for _ in range(3):
    for group in groups:
        is_cpu_only = dist.get_backend(group) == "gloo"
        for where in ("cpu",) if is_cpu_only else ("cpu", own):
            tensor = torch.full((1000,), rank + 1.0, device=where)
            dist.all_reduce(tensor, group=group)
            assert bool((tensor == ranks * (ranks + 1) / 2).all()), (group, where)
    tensor = torch.full((1000,), rank + 1.0, device=own)
    dist.all_reduce(tensor, group=alone[rank])
    assert bool((tensor == rank + 1).all())
under_way = [torch.ones(3, device=where) for where in ("cpu", own, "cpu", own)]
for work in [dist.all_reduce(each, async_op=True) for each in under_way]:
    work.wait()
assert [each.tolist() for each in under_way] == [[ranks] * 3] * 4
dist.barrier()
device.say("mixed", rank, "right")
dist.destroy_process_group()
