"""A rank is killed while kernels run; the others are told, and can go on with their device.

lost.py kill|raise|stay VICTIM
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.gpu.workers import on_device as device

import rallypoint

how, victim = sys.argv[1], int(sys.argv[2])
own = device.own_device()
dist.init_process_group("rallypoint")
rank = dist.get_rank()
tensor = torch.ones(1 << 20, device=own)
dist.all_reduce(tensor)
dist.barrier()
if how == "stay":
    Path(f"up.{rank}").touch()
    while True:  # until the launcher ends it, with kernels in the queue
        device.keep_busy(0.5)
        time.sleep(0.2)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which would end us before we tell
device.keep_busy(0.3)
tensor.add_(1)
if rank == victim:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("rank gave up with kernels in the queue")
began = time.monotonic()
try:
    while True:
        dist.all_reduce(tensor)
except rallypoint.PeerLostError as error:
    assert error.rank == victim
took_s = time.monotonic() - began
again = torch.full((1000,), 3.0, device=own)
assert float((again * 2).sum()) == 6000  # the device is as it was
device.say("told", rank, "soon" if took_s < 20 else f"after {took_s} s")
