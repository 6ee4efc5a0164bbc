"""One rank of a calibration: times all_reduce with each algorithm and size; rank 0 writes the rows.

rallypoint run --nproc-per-node 4 -m rallypoint.lab.bench.calibrate_worker OUT ring 8,64 40

Every algorithm and size is measured for a moment in each of many rounds, so that other load on the
machine, which comes and goes, affects all equally. That load is recorded for each round, so that
the quietest rounds can be selected.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import rallypoint as dist

BATCH_S = 0.003
FEWEST_CALLS, MOST_CALLS = 2, 5_000

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


def main(out: str, algorithms: list[str], sizes: list[int], rounds: int) -> None:
    """Measure; every rank runs the same code."""
    dist.init_process_group()
    # All sizes use the same memory: where an array lies can matter more than its size.
    whole = np.zeros(max(sizes) // 4, np.float32)
    arrays = {nbytes: whole[: nbytes // 4] for nbytes in sizes}
    cells = [(name, nbytes) for nbytes in sizes for name in algorithms]
    calls = {(name, nbytes): calls_for(arrays[nbytes], name) for name, nbytes in cells}
    times_us: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
    disturbed = []
    for _ in range(rounds):
        busy_s, began_s = others_s(), time.perf_counter()
        for name, nbytes in cells:
            time_us = batch_us(arrays[nbytes], name, calls[name, nbytes])
            times_us[name, nbytes].append(time_us)
        disturbed.append((others_s() - busy_s) / (time.perf_counter() - began_s))
    rows = [
        {
            "algorithm": name,
            "ranks": dist.get_world_size(),
            "bytes": nbytes,
            "times_us": times_us[name, nbytes],
        }
        for name, nbytes in cells
    ]
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"rows": rows, "disturbed": disturbed}))
    dist.barrier()
    dist.destroy_process_group()


def calls_for(array: Floats, algorithm: str) -> int:
    """The number of calls that take about BATCH_S: rank 0's number, on every rank."""
    once_us = min(batch_us(array, algorithm, 2) for _ in range(3))
    calls = np.array([max(FEWEST_CALLS, min(MOST_CALLS, int(BATCH_S * 1e6 / once_us)))])
    dist.broadcast(calls, src=0)
    return int(calls[0])


def batch_us(array: Floats, algorithm: str, calls: int) -> float:
    """The mean time of a call in microseconds; all ranks begin together, after warm-up calls."""
    dist.all_reduce(array, algorithm=algorithm)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(array, algorithm=algorithm)
    return (time.perf_counter() - begin) / calls * 1e6


def others_s() -> float:
    """Processor seconds used since boot by everything except the ranks."""
    own = np.array([time.process_time()])
    dist.all_reduce(own)
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split()[1:9]
    ticks = sum(map(int, (user, nice, system, *interrupts)))
    return ticks / os.sysconf("SC_CLK_TCK") - float(own[0])


if __name__ == "__main__":
    _, out, algorithms, sizes, rounds = sys.argv
    main(out, algorithms.split(","), [int(size) for size in sizes.split(",")], int(rounds))
