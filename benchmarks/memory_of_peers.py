"""Large messages copied through rings, read in arenas, or read by the kernel, in turn.

    python benchmarks/memory_of_peers.py [--nproc-per-node 2] [OPERATION ...]

float32. For each way a group of its own is formed (RALLYPOINT_DIRECT). A row has the fastest call,
the first tenth and the median of single calls on rank 0, in microseconds: on a machine that does
other things too, the fastest says the most.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from table import human_bytes, print_table, save
from workers import answer, is_worker, measured_by

import rallypoint as dist
from rallypoint.process_group.groups.group import ProcessGroup

SIZES = [32 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
ROUNDS = 7
ROUND_S = 0.03
WAYS = {"copied": "0", "arena": "", "kernel": "1"}


def prepare(operation: str, group: ProcessGroup, way: str, nbytes: int) -> Callable[[], Any]:
    """A call on `nbytes` of each rank; the larger buffer of reduce_scatter and all_to_all."""
    ranks = dist.get_world_size()

    def new(items: int) -> NDArray[np.float32]:
        array = (dist.empty if way == "arena" else np.empty)(items, np.float32)
        array[...] = 0
        return array

    items = nbytes // 4 // ranks * ranks
    mine = new(items)
    match operation:
        case "all_reduce":
            return lambda: dist.all_reduce(mine, group=group)
        case "broadcast":
            return lambda: dist.broadcast(mine, 0, group=group)
        case "all_gather":
            everything = new(items * ranks)
            return lambda: dist.all_gather_into_tensor(everything, mine, group=group)
        case "reduce_scatter":
            part = new(items // ranks)
            return lambda: dist.reduce_scatter_tensor(part, mine, group=group)
        case "all_to_all":
            swapped = new(items)
            return lambda: dist.all_to_all_single(swapped, mine, group=group)
    raise SystemExit(f"no operation {operation!r}")


def times_us(call: Callable[[], Any], calls: int) -> list[float]:
    """Of each call by itself; all ranks begin together."""
    times = []
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
        end = time.perf_counter()
        times.append((end - begin) * 1e6)
        begin = end
    return times


def worker(operations: list[str]) -> None:
    dist.init_process_group()
    everyone = list(range(dist.get_world_size()))
    groups: dict[str, ProcessGroup] = {}
    for way, setting in WAYS.items():
        os.environ["RALLYPOINT_DIRECT"] = setting
        group = dist.new_group(everyone)
        assert isinstance(group, ProcessGroup)
        groups[way] = group
    rows = []
    for operation in operations:
        for nbytes in SIZES:
            calls = {way: prepare(operation, groups[way], way, nbytes) for way in WAYS}
            for call in calls.values():
                call()
            count = max(3, int(ROUND_S / (nbytes / 3e9 + 20e-6)))
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(ROUNDS):
                for way in list(WAYS)[:: 1 if number % 2 else -1]:
                    times[way] += times_us(calls[way], count)
            row: dict[str, Any] = {"operation": operation, "size": human_bytes(nbytes)}
            for way, us in times.items():
                us.sort()
                row[f"{way} fastest us"] = round(us[0], 1)
                row[f"{way} tenth us"] = round(us[len(us) // 10], 1)
                row[f"{way} median us"] = round(statistics.median(us), 1)
            rows.append(row)
    if dist.get_rank() == 0:
        answer(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("operations", nargs="*", metavar="OPERATION", default=["all_reduce"])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    options = parser.parse_args()
    if is_worker():
        worker(options.operations)
        return
    rows = measured_by(options.nproc_per_node)
    columns = list(rows[0])
    print_table(columns, [[str(row[column]) for column in columns] for row in rows])
    save("memory_of_peers", rows)


if __name__ == "__main__":
    main()
