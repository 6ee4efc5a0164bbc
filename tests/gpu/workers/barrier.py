"""Whoever passes the barrier finds the work of the others' streams done.

Each rank in turn leaves its stream with work, and a file with the time at which that was done.
"""

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.gpu.workers import on_device as device

own = device.own_device()
dist.init_process_group("rallypoint")
rank, ranks = dist.get_rank(), dist.get_world_size()
first = torch.ones(1, device=own)
dist.all_reduce(first)  # from now on the group knows that it works on this device


def note(turn: int, done: torch.cuda.Event | None) -> None:
    """When the work is done, in a file."""
    if done is not None:
        done.synchronize()
    Path(f"done.{turn}").write_text(repr(time.monotonic()))


for turn in range(ranks):
    dist.barrier()
    waiter = None
    if rank == turn:
        device.keep_busy(0.5)
        event = torch.cuda.Event() if device.IS_GPU else None
        if event is not None:
            event.record()
        waiter = threading.Thread(target=note, args=(turn, event))
        waiter.start()
    dist.barrier()
    passed = time.monotonic()
    assert device.is_idle()
    if waiter is not None:
        waiter.join()
    dist.barrier()
    late_by = float(Path(f"done.{turn}").read_text()) - passed
    # The thread that notes it needs a moment; the work took ten times as long.
    device.say("turn", turn, rank, "in order" if late_by < 0.05 else f"late by {late_by}")
dist.destroy_process_group()
