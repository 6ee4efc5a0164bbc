"""Random calls on this rank's device, against the same calls with tensors on the CPU.

random_bits.py SEED CALLS
"""

import sys

import torch.distributed as dist
from tests.gpu.workers import on_device as device
from tests.random_calls import Draw, begun, bits, drawn_call, finished

seed, calls = map(int, sys.argv[1:])
dist.init_process_group("rallypoint")
group, plain = dist.group.WORLD, dist.new_group(backend="rallypoint")
rank, ranks = dist.get_rank(), dist.get_world_size()
wanted = []
for number in range(calls):
    draw = Draw(seed, number, rank, ranks)
    work, tensors = begun(drawn_call(seed, number), draw, plain)
    wanted.append(bits(tensors) if finished(work) else None)
own = device.own_device()
wrong = []
for number in range(calls):
    draw = Draw(seed, number, rank, ranks, device=str(own))
    work, tensors = begun(drawn_call(seed, number), draw, group)
    if finished(work) and bits(tensors) != wanted[number]:
        wrong.append(f"{drawn_call(seed, number).__name__} #{number} {draw.dtype} {draw.operator}")
dist.barrier()
device.say("random", rank, f"{len(wrong)} wrong: {wrong[:3]}" if wrong else "right")
dist.destroy_process_group()
