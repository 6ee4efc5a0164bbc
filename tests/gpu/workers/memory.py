"""What calls take of the device's memory, and of the host's, they give back."""

import resource
import time

import torch
import torch.distributed as dist
from tests.gpu.workers import on_device as device

own = device.own_device()
dist.init_process_group("rallypoint")
tensor = torch.ones(1 << 21, device=own)  # 8 MiB
dist.all_reduce(tensor)
before, host_before = device.allocated(), 0
for turn in range(140):
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    del work
    tensor.fill_(1)
    if turn == 20:
        host_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - host_before
assert device.allocated() == before, (device.allocated(), before)
# Some 65 MiB in a rank that is last to come to a call in device memory, as never before.
assert grown_kib < 128 * 1024, f"{grown_kib} KiB in 120 calls of 8 MiB"
# Others have a tensor's memory open for about a second after the last call.
dist.barrier()
free = device.free_bytes()
large = torch.ones(1 << 26, device=own)  # 256 MiB
dist.all_reduce(large)
del large
if device.IS_GPU:
    torch.cuda.empty_cache()
dist.barrier()
deadline = time.monotonic() + 60
while device.free_bytes() < free - (64 << 20):
    assert time.monotonic() < deadline, "memory that was freed is still taken"
    time.sleep(0.1)
dist.barrier()
dist.destroy_process_group()
del tensor
assert device.allocated() <= before - (1 << 23) if device.IS_GPU else True
device.say("memory", "returned")
