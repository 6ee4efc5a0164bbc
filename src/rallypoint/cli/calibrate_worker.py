"""One rank of a calibration: times all_reduce with each algorithm and size, rank 0 writes the rows.

rallypoint run --standalone --nproc-per-node 4 -m rallypoint.cli.calibrate_worker OUT A,B 8,64
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import rallypoint as dist

BATCH_S = 0.005
BATCHES = 15
MOST_CALLS = 5_000


def main(out: str, algorithms: list[str], sizes: list[int]) -> None:
    """Measure; every rank runs the same."""
    rows: list[dict[str, object]] = []
    for algorithm in algorithms:
        os.environ["RALLYPOINT_ALGORITHM"] = algorithm
        dist.init_process_group()
        for nbytes in sizes:
            time_us = measure(nbytes)
            rows.append(
                {
                    "algorithm": algorithm,
                    "ranks": dist.get_world_size(),
                    "bytes": nbytes,
                    "time_us": time_us,
                }
            )
        is_first = dist.get_rank() == 0
        dist.barrier()
        dist.destroy_process_group()
    if is_first:
        Path(out).write_text(json.dumps(rows))


def measure(nbytes: int) -> float:
    """Lower quartile over batches of the mean time of a call, in microseconds.

    Other work on the machine only adds; the quartile is the machine's own pace.
    """
    array = np.zeros(nbytes // 4, np.float32)
    dist.all_reduce(array)
    calls = np.array([max(3, min(MOST_CALLS, int(BATCH_S * 1e6 / batch_us(array, 3))))])
    dist.broadcast(calls, src=0)
    return sorted(batch_us(array, int(calls[0])) for _ in range(BATCHES))[BATCHES // 4]


def batch_us(array: np.ndarray[tuple[int], np.dtype[np.float32]], calls: int) -> float:
    """Mean time of a call; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(array)
    return (time.perf_counter() - begin) / calls * 1e6


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2].split(","), [int(size) for size in sys.argv[3].split(",")])
