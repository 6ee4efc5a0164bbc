"""What our calls add to another library's: all_reduce by gloo, behind our calls and PyTorch's own.

    python benchmarks/other_backends.py [--nproc-per-node 2] [--repeats 15]

All groups are in the same processes and take turns, in changing order; our engine's, too, for
comparison. Figures are medians over repeats of the mean of some calls, on rank 0, and the least.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from table import human_bytes, need, print_table, save
from workers import answer, is_worker, measured_by

CALLS = {8: 300, 64 << 10: 200, 4 << 20: 10}  # by size
CONTENDERS = ("gloo, our calls", "gloo, PyTorch's", "engine")


def turn_us(call: Callable[[], object], calls: int) -> float:
    """The time of one call, of so many."""
    for _ in range(calls // 10):
        call()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def measure(repeats: int) -> None:
    import torch
    import torch.distributed as torch_dist

    import rallypoint as dist

    dist.init_process_group("gloo")
    torch_dist.init_process_group("gloo")
    engine = dist.new_group(backend="rallypoint")
    rows: list[dict[str, Any]] = []
    for nbytes, calls in CALLS.items():
        array, tensor = np.zeros(nbytes // 4, np.float32), torch.zeros(nbytes // 4)
        functions: list[Callable[[], object]] = [
            lambda array=array: dist.all_reduce(array),  # type: ignore[misc]
            lambda tensor=tensor: torch_dist.all_reduce(tensor),  # type: ignore[misc]
            lambda array=array: dist.all_reduce(array, group=engine),  # type: ignore[misc]
        ]
        taken: dict[str, list[float]] = {name: [] for name in CONTENDERS}
        for number in range(repeats):
            turns = list(zip(CONTENDERS, functions, strict=True))
            for name, function in turns if number % 2 else turns[::-1]:
                taken[name].append(turn_us(function, calls))
        medians = {name: statistics.median(each) for name, each in taken.items()}
        least = {name: min(each) for name, each in taken.items()}
        rows.append({"bytes": nbytes, "median_us": medians, "least_us": least})
    if dist.get_rank() == 0:
        answer(rows)
    torch_dist.destroy_process_group()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    if is_worker():
        measure(arguments.repeats)
        return
    if not need("torch", "gloo comes with it"):
        return
    rows = measured_by(arguments.nproc_per_node)
    cells = [
        [human_bytes(row["bytes"])]
        + [f"{row['median_us'][name]:.1f} ({row['least_us'][name]:.1f})" for name in CONTENDERS]
        for row in rows
    ]
    print_table(["us", *CONTENDERS], cells)
    save("other_backends", rows)


if __name__ == "__main__":
    main()
