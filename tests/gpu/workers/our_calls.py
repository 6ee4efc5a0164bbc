"""Every call of `import rallypoint` on tensors of a device, which NCCL (or gloo) serves.

our_calls.py BACKEND
"""

import sys
from typing import Any

import numpy as np
import torch
from tests.gpu.workers import on_device as device

import rallypoint as dist

backend = sys.argv[1]
device.seen_as_device_arrays()
dist.init_process_group(backend)
own, rank, ranks = device.own_device(), dist.get_rank(), dist.get_world_size()
assert dist.get_backend() == backend


def full(items: int, value: float, dtype: Any = torch.float32) -> Any:
    return torch.full((items,), value, dtype=dtype, device=own)


def same(tensor: Any, *values: float) -> None:
    """Its blocks of equal length have these values; waits for the device."""
    parts = tensor.reshape(len(values), -1).cpu()
    for part, value in zip(parts, values, strict=True):
        assert bool((part == value).all()), (tensor, values)


everyone = [float(each) for each in range(ranks)]
for dtype in (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int32,
    torch.int64,
):
    for op, value in (("SUM", ranks), ("PRODUCT", 1), ("MIN", 1), ("MAX", 1)):
        tensor = full(1000, 1, dtype)
        dist.all_reduce(tensor, dist.ReduceOp[op])
        same(tensor, value)
with device.side_stream():  # what was given to this stream comes before the call, and after it
    tensor = full(1 << 20, 1)
    device.keep_busy(0.05)
    tensor *= 2
    dist.all_reduce(tensor)
    tensor += 1
    same(tensor, 2 * ranks + 1)
tensor = full(10, rank)
dist.broadcast(tensor, ranks - 1)
same(tensor, ranks - 1)
tensor = full(10, 1)
dist.reduce(tensor, 0)
same(tensor, ranks if rank == 0 else 1)
gathered = full(7 * ranks, -1)
dist.all_gather_into_tensor(gathered, full(7, rank))
same(gathered, *everyone)
uneven = [full(each + 1, -1) for each in range(ranks)]
dist.all_gather(uneven, full(rank + 1, rank))
for each in range(ranks):
    same(uneven[each], each)
part = full(3, -1)
dist.reduce_scatter_tensor(part, full(3 * ranks, 1))
same(part, ranks)
out = full(2 * ranks, -1)
dist.all_to_all_single(out, full(2 * ranks, rank))
same(out, *everyone)
lengths = [each + 1 for each in range(ranks)]
out = full(ranks * (rank + 1), -1)  # each rank sends rank r r + 1 items, uneven from here on
dist.all_to_all_single(out, full(sum(lengths), rank), [rank + 1] * ranks, lengths)
same(out, *everyone)
outs = [full(3, -1) for _ in range(ranks)]
dist.all_to_all(outs, [full(3, rank) for _ in range(ranks)])
for each, block in enumerate(outs):
    same(block, each)
part = full(rank + 1, -1)
dist.reduce_scatter(part, [full(each, 1) for each in lengths])
same(part, ranks)
several = [full(5, 1), full(6, rank)]
dist.all_reduce_coalesced(several)
same(several[0], ranks)
same(several[1], sum(everyone))
lists = [[full(2, -1), full(3, -1)] for _ in range(ranks)]
dist.all_gather_coalesced(lists, [full(2, rank), full(3, -rank)])
for each, (one, other) in enumerate(lists):
    same(one, each)
    same(other, -each)
with dist._coalescing_manager():
    many = [full(4, 1) for _ in range(3)]
    for each in many:
        dist.all_reduce(each)
for tensor in many:
    same(tensor, ranks)
square = full(ranks * 6, rank).reshape(ranks, 6)  # of two dimensions
dist.all_reduce(square)
same(square, sum(everyone))
blocks = [full(4, -1) for _ in range(ranks)] if rank == 0 else None
dist.gather(full(4, rank), blocks, 0)
for each, block in enumerate(blocks or []):
    same(block, each)
got = full(4, -1)
dist.scatter(got, [full(4, each) for each in range(ranks)] if rank == 0 else None, 0)
same(got, rank)
if ranks > 1:
    received = full(5, -1)
    works = [
        dist.isend(full(5, rank), (rank + 1) % ranks),
        dist.irecv(received, (rank - 1) % ranks),
    ]
    for work in works:
        assert work is not None
        work.wait()
    same(received, (rank - 1) % ranks)
    received = full(5, -1)
    there = dist.P2POp(dist.isend, full(5, rank), (rank + 1) % ranks)
    back = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([there, back]):
        work.wait()
    same(received, (rank - 1) % ranks)
strided = full(20, rank)[::2]
dist.all_reduce(strided)
same(strided, sum(everyone))
objects: list[Any] = [None] * ranks
dist.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": each} for each in range(ranks)]
names: list[Any] = ["of rank 0" if rank == 0 else None]
dist.broadcast_object_list(names, 0)
assert names == ["of rank 0"]
device.keep_busy(0.05)
dist.barrier()
assert device.is_idle()
if device.IS_GPU:
    try:
        dist.all_reduce(np.ones(3))
    except dist.InvalidTypeError as error:
        assert "takes tensors on cuda" in str(error)
    else:
        raise AssertionError("an array of the CPU went to NCCL")
dist.destroy_process_group()
device.say("called", rank, "right")
