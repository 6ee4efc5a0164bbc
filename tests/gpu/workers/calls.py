"""Every collective on this rank's device: as it is, in the background, and on a side stream.

calls.py BACKEND
"""

import sys

import torch
import torch.distributed as dist
from tests.gpu.workers import on_device as device

own = device.own_device()
dist.init_process_group(sys.argv[1])
rank, ranks = dist.get_rank(), dist.get_world_size()
COUNT = 1 << 18


def late(value: float) -> torch.Tensor:
    """A tensor whose items are written by the stream, and not soon."""
    tensor = torch.full((COUNT,), -1.0, device=own)
    device.keep_busy(0.05)
    return tensor.fill_(value)


def check(tensor: torch.Tensor, value: float) -> None:
    """On the current stream, as a program would go on; the host waits at the end only."""
    wrong.append((tensor != value).sum())


def wait(work: object, is_async: bool) -> None:
    if is_async:
        work.wait()  # type: ignore[attr-defined]


def every_call(is_async: bool) -> None:
    more = {"async_op": is_async}
    tensor = late(rank + 1)
    wait(dist.all_reduce(tensor, **more), is_async)
    check(tensor, ranks * (ranks + 1) / 2)
    tensor = late(rank)
    wait(dist.broadcast(tensor, ranks - 1, **more), is_async)
    check(tensor, ranks - 1)
    tensor = late(rank + 1)
    wait(dist.reduce(tensor, 0, **more), is_async)
    if rank == 0:
        check(tensor, ranks * (ranks + 1) / 2)
    outputs = [late(-1) for _ in range(ranks)]
    wait(dist.all_gather(outputs, late(rank), **more), is_async)
    for peer, output in enumerate(outputs):
        check(output, peer)
    whole = torch.empty(COUNT * ranks, device=own)
    wait(dist.all_gather_into_tensor(whole, late(rank), **more), is_async)
    for peer in range(ranks):
        check(whole[peer * COUNT : (peer + 1) * COUNT], peer)
    part = torch.empty(COUNT, device=own)
    whole = torch.cat([late(peer) for peer in range(ranks)])
    wait(dist.reduce_scatter_tensor(part, whole, **more), is_async)
    check(part, rank * ranks)
    wait(dist.all_to_all_single(torch.empty_like(whole), whole, **more), is_async)
    if ranks > 1:
        tensor = torch.empty(COUNT, device=own)
        there = dist.P2POp(dist.isend, late(rank), (rank + 1) % ranks)
        back = dist.P2POp(dist.irecv, tensor, (rank - 1) % ranks)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()
        check(tensor, (rank - 1) % ranks)


wrong: list[torch.Tensor] = []
for is_async in (False, True):
    every_call(is_async)
    with device.side_stream():
        every_call(is_async)

# What follows a future goes on streams that whoever waits for the last future waits for.
tensor = late(1)
future = dist.all_reduce(tensor, async_op=True).get_future()


def halve(done: torch.futures.Future) -> torch.Tensor:
    device.keep_busy(0.05)
    value = done.value()
    return (value[0] if isinstance(value, list) else value) / 2


with device.side_stream():
    check(future.then(halve).wait(), ranks / 2)

with device.side_stream():
    tensor = late(1)
    try:
        work = dist.all_reduce(tensor[::2], async_op=True)
    except ValueError as error:  # NCCL's, and no call has begun
        assert "must be contiguous" in str(error) and ranks <= torch.cuda.device_count()
    else:  # a result that gets to its place by way of a copy on the device
        work.get_future()  # has another thread take part
        work.wait()
        check(tensor[::2], ranks)
        check(tensor[1::2], 1)

objects: list[object] = [None] * ranks
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": peer} for peer in range(ranks)]
if device.IS_GPU:
    torch.cuda.synchronize()  # what was found on the side streams is read from this one
total = int(sum(int(each) for each in wrong))
device.say("calls", rank, "right" if total == 0 else f"{total} items of {len(wrong)} are wrong")
dist.destroy_process_group()
