"""A large all_reduce in the background of Python that computes: what it costs, and whom it stops.

    python benchmarks/overlap.py [--nproc-per-node 2] [--mib 64] [--repeats 7]

Each rank begins an all_reduce of 64 MiB float32 with `async_op=True` and computes in pure Python
until it is done. Alone, the operation takes A seconds and the computing C; both need the CPU, so
that side by side they cannot take less than the sum of both CPU times over the cores. The ratio is
what they took to that sum; the CPU ratio is that of the CPU times, which other work on the machine
does not change much. The pause is the longest time between two turns of the Python loop, of
a few microseconds each; the pause alone is that of the same loop with no operation: what the
machine, with whatever else it runs, does to it.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from typing import Any

import numpy as np
from table import print_table, save
from workers import answer, is_worker, measured_by

import rallypoint as dist


def compute(turns: int) -> tuple[int, float]:
    """A loop of pure Python; its result, and the longest time between two turns."""
    total, longest = 0, 0.0
    before = time.perf_counter()
    for turn in range(turns):
        for number in range(60):
            total += number * turn
        now = time.perf_counter()
        longest = max(longest, now - before)
        before = now
    return total, longest


def cpu_s() -> float:
    """Of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(array: np.ndarray | None, turns: int) -> dict[str, float]:
    """One all_reduce, one computation, or both side by side; all ranks begin together."""
    dist.barrier()
    begin, begin_cpu, longest = time.perf_counter(), cpu_s(), 0.0
    work = None if array is None else dist.all_reduce(array, async_op=True)
    if turns:
        _, longest = compute(turns)
    if work is not None:
        work.wait()
    return {
        "s": time.perf_counter() - begin,
        "cpu_s": cpu_s() - begin_cpu,
        "pause_s": longest,
    }


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    array = np.ones(options.mib << 18, np.float32)
    timed(array, 0)
    timed(array, 0)
    alone = statistics.median(timed(array, 0)["s"] for _ in range(5))
    turns_of = np.array([int(alone * 1000 / max(timed(None, 1000)["s"], 1e-6))])
    dist.broadcast(turns_of, 0)
    turns = int(turns_of[0])  # computing for about as long as the operation takes
    rows: list[dict[str, dict[str, float]]] = []
    for _ in range(options.repeats):
        array[...] = 0
        row = {
            "operation": timed(array, 0),
            "computing": timed(None, turns),
            "both": timed(array, turns),
        }
        rows.append(row)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, rows)
    if rank == 0:
        answer(gathered)
    dist.destroy_process_group()


def report(ranks: list[list[dict[str, dict[str, float]]]], mib: int) -> None:
    cores = len(os.sched_getaffinity(0))
    table, rows = [], []
    for repeat in zip(*ranks, strict=True):
        took = {
            part: max(each[part]["s"] for each in repeat)
            for part in ("operation", "computing", "both")
        }
        cpu = {
            part: sum(each[part]["cpu_s"] for each in repeat)
            for part in ("operation", "computing", "both")
        }
        least = (cpu["operation"] + cpu["computing"]) / cores
        pauses = {
            part: max(each[part]["pause_s"] for each in repeat) for part in ("computing", "both")
        }
        rows.append(
            {
                "mib": mib,
                **{f"{part}_ms": took[part] * 1e3 for part in took},
                "cpu_sum_over_cores_ms": least * 1e3,
                "ratio": took["both"] / least,
                "cpu_of_both_ms": cpu["both"] * 1e3,
                "cpu_ratio": cpu["both"] / (least * cores),
                "pause_ms": pauses["both"] * 1e3,
                "pause_alone_ms": pauses["computing"] * 1e3,
            }
        )
        table.append(tuple(f"{value:.1f}" for value in list(rows[-1].values())[1:4]))
        table[-1] += (
            f"{least * 1e3:.1f}",
            f"{rows[-1]['ratio']:.2f}",
            f"{rows[-1]['cpu_ratio']:.2f}",
            f"{rows[-1]['pause_ms']:.1f}",
            f"{rows[-1]['pause_alone_ms']:.1f}",
        )
    columns = ("operation ms", "computing ms", "both ms", "least ms", "ratio", "CPU ratio")
    print_table((*columns, "pause ms", "alone ms"), table)
    print(
        f"median ratio {statistics.median(row['ratio'] for row in rows):.2f}, of CPU time "
        f"{statistics.median(row['cpu_ratio'] for row in rows):.2f}; longest pause "
        f"{max(row['pause_ms'] for row in rows):.1f} ms"
    )
    save("overlap", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if is_worker():
        worker(options)
    else:
        report(measured_by(options.nproc_per_node), options.mib)


if __name__ == "__main__":
    main()
