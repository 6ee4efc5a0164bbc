"""What PyTorch's tools see of a backend's calls; each rank writes down what it found.

    rallypoint run --nproc-per-node 2 torch_tools.py BACKEND DIRECTORY

Parts that a version of PyTorch does not have are left out.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

c10d: Any = torch._C._distributed_c10d
OURS = ("c10d::", "rallypoint:")


def events(path: Path, body: Any) -> list[tuple[str, Any]]:
    """Names and input sizes of what concerns us in the trace of `body`, as exported."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        body()
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())["traceEvents"]
    return [
        (event["name"], event["args"].get("In msg nelems", event["args"].get("Input Dims")))
        for event in trace
        if event.get("name", "").startswith(OURS) and "args" in event
    ]


def trained(directory: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    model: Any = DistributedDataParallel(torch.nn.Linear(9, 11))

    def step() -> None:
        model(torch.ones(2, 9)).sum().backward()

    step()
    return {"ddp": events(directory / f"ddp.{dist.get_rank()}.json", step)}


def called(directory: Path) -> dict[str, Any]:
    value, whole = torch.ones(7), torch.empty(14)
    rank = dist.get_rank()
    works: list[Any] = []

    def body() -> None:
        dist.all_reduce(value)
        dist.all_gather_into_tensor(whole, value)
        works.append(dist.all_reduce(value, async_op=True))
        works[0].wait()
        (dist.send if rank == 0 else dist.recv)(value, 1 - rank)
        dist.barrier()

    found = events(directory / f"calls.{rank}.json", body)
    assert works[0].is_completed() and works[0].result()[0] is value  # our Work, not torch's
    assert value.tolist() == [4.0] * 7
    return {"calls": found}


def counted() -> dict[str, Any]:
    from torch.distributed.tensor.debug import CommDebugMode

    before = dist.group.WORLD._get_sequence_number_for_group()
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(2))
        dist.broadcast(torch.ones(2), 0)
    after = dist.group.WORLD._get_sequence_number_for_group()
    counts = {str(op): count for op, count in mode.get_comm_counts().items()}
    return {"counts": counts, "sequence": after - before}


def hooked() -> dict[str, Any]:
    group: Any = dist.group.WORLD
    if not hasattr(group, "register_pre_hook"):
        return {}
    seen: list[str] = []
    group.register_pre_hook(1, lambda given: seen.append(f"before {given.name.name}"))
    group.register_post_hook(2, lambda given: seen.append(f"after {given.name.name}"))
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    group.unregister_pre_hook(1)
    dist.broadcast(torch.ones(2), 0)
    group.unregister_post_hook(2)
    dist.all_reduce(torch.ones(2))
    return {"hooks": seen, "is_watched": group.is_watched}


def told() -> dict[str, Any]:
    group: Any = dist.group.WORLD
    found = {
        "backend": dist.get_backend(),
        "config": dist.get_backend_config(),
        "name": group.group_name,
        "devices": [device.type for device in group._device_types],
        "below": group._get_backend(torch.device("cpu")).name(),
    }
    group.set_timeout(timedelta(seconds=77))
    dist.all_reduce(torch.ones(2))
    if hasattr(group, "backend"):
        found["timeout_s"] = group.backend.options._timeout.total_seconds()
        split: Any = dist.new_group([0, 1])
        found["split"] = [split.rank(), split.size(), split.group_desc]
    return found


def functional() -> dict[str, Any]:
    """Messages as torch.compile makes them: C++ asks the group for them."""
    operators: Any = torch.ops._c10d_functional
    if not hasattr(operators, "batch_p2p_ops") or not hasattr(dist.group.WORLD, "backend"):
        return {}
    rank = dist.get_rank()
    sent, received = torch.full((2,), float(rank)), torch.empty(2)
    kinds, peers = ["isend", "irecv"], [1 - rank] * 2
    name = dist.group.WORLD.group_name
    for tensor in operators.batch_p2p_ops(kinds, peers, [0, 0], [sent, received], name):
        operators.wait_tensor(tensor)
    return {"p2p": received.tolist()}


def stuck(directory: Path) -> None:
    """Rank 1 does not come to the third all_reduce; each rank dumps its flight recorder."""
    rank = dist.get_rank()

    def dump() -> None:
        # Before 2.15 there is one recorder for all backends.
        of = {"backend": "rallypoint"} if "backend" in c10d._dump_fr_trace.__doc__ else {}
        trace = c10d._dump_fr_trace(True, True, False, **of)
        (directory / f"trace_{rank}").write_bytes(trace)
        os._exit(0)

    threading.Timer(2, dump).start()
    for count in (5, 6, 7):
        if rank == 0 or count < 7:
            dist.all_reduce(torch.ones(count))
    threading.Event().wait()


def main() -> None:
    backend, path = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group(backend)
    if sys.argv[3:] == ["stuck"]:
        stuck(path)
    found = {**told(), **trained(path), **called(path), **counted(), **hooked(), **functional()}
    (path / f"found.{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
