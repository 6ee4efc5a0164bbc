"""Our all_reduce against PyTorch's gloo: the same processes, the same buffers, in turn.

    python benchmarks/all_reduce.py [--nproc-per-node 2] [--repeats 9] [--sizes 8 1024 ...]

float32, SUM, in place. Each row is the median over repeats of the mean time of a batch of calls on
rank 0, the order alternating. Gloo is measured with its defaults. Without PyTorch, only ours is.

A second table shows what it costs to ask for an algorithm: 8 bytes by the same program, chosen by
us, the same with another keyword (which Python does not pass for nothing), by its name, and from a
file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from table import human_bytes, need, print_table, save

import rallypoint as dist

ASKED_REPEATS = 45
ASKED_BATCH_S = 0.01
OWN_FILE = """
from rallypoint.schedule.algorithms import direct

def own(team):
    return direct.all_reduce_one_shot(team.ranks)
"""
SIZES = [8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
BATCH_S = 0.05


def batch_us(call: Callable[[], Any], calls: int) -> float:
    """Mean time of a call in microseconds; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def calls_for(call: Callable[[], Any], batch_s: float = BATCH_S) -> int:
    """How many calls take about `batch_s`: the same number on every rank, rank 0's."""
    call()
    once_us = batch_us(call, 5)
    count = np.array([max(3, min(20_000, int(batch_s * 1e6 / once_us)))])
    dist.broadcast(count, src=0)
    return int(count[0])


def asked_for() -> dict[str, list[float]]:
    """Microseconds of a call of 8 bytes, by who says which algorithm; round by round."""
    array = np.zeros(2, np.float32)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "own.py")
        file.write_text(OWN_FILE)
        contenders = {
            "chosen": lambda: dist.all_reduce(array),
            "with op=": lambda op=dist.ReduceOp.SUM: dist.all_reduce(array, op=op),
            "by name": lambda: dist.all_reduce(array, algorithm="direct_one_shot"),
            "own file": lambda name=str(file): dist.all_reduce(array, algorithm=name),
        }
        for call in contenders.values():
            call()
    calls = calls_for(contenders["chosen"], ASKED_BATCH_S)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(ASKED_REPEATS):
        for name in order:
            times[name].append(batch_us(contenders[name], calls))
        order = [*order[1:], order[0]]
    return times


def worker(options: argparse.Namespace) -> None:
    dist.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch: Any = None
    if need("torch", "gloo cannot be measured (pip install torch)"):
        import torch

        torch.distributed.init_process_group("gloo")
    asked = asked_for()
    rows = []
    for nbytes in options.sizes:
        array = np.full(nbytes // 4, rank + 1, np.float32)
        total = ranks * (ranks + 1) / 2
        dist.all_reduce(array)
        assert (array == total).all(), "rallypoint: wrong sum"
        array[...] = 0
        contenders: dict[str, Callable[[], Any]] = {
            "rallypoint": lambda a=array: dist.all_reduce(a)
        }
        if torch is not None:
            tensor = torch.full((nbytes // 4,), rank + 1, dtype=torch.float32)
            torch.distributed.all_reduce(tensor)
            assert (tensor == total).all(), "gloo: wrong sum"
            tensor.zero_()
            contenders["gloo"] = lambda t=tensor: torch.distributed.all_reduce(t)
        calls = {name: calls_for(call) for name, call in contenders.items()}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for repeat in range(options.repeats):
            order = list(contenders) if repeat % 2 == 0 else list(reversed(contenders))
            for name in order:
                times[name].append(batch_us(contenders[name], calls[name]))
        medians = {f"{name}_us": statistics.median(values) for name, values in times.items()}
        rows.append({"bytes": nbytes, "ranks": ranks, **medians})
        if rank == 0:
            print(f"{human_bytes(nbytes)} measured", file=sys.stderr)
    if rank == 0:
        Path(options.worker).write_text(json.dumps([rows, asked]))
    dist.barrier()
    if torch is not None:
        torch.distributed.destroy_process_group()
    dist.destroy_process_group()


def report(rows: list[dict[str, Any]]) -> None:
    table = []
    for row in rows:
        ranks, nbytes, ours = row["ranks"], row["bytes"], row["rallypoint_us"]
        busbw = nbytes / ours / 1e3 * 2 * (ranks - 1) / ranks
        peer = row.get("gloo_us")
        row["ratio"] = peer / ours if peer else None
        table.append(
            (
                human_bytes(nbytes),
                f"{ours:.2f}",
                f"{busbw:.2f}",
                f"{peer:.2f}" if peer else "-",
                f"{row['ratio']:.1f}" if peer else "-",
            )
        )
    print_table(("size", "ours us", "busbw GB/s", "gloo us", "times faster"), table)
    save("all_reduce", rows)


def report_asked(times: dict[str, list[float]], ranks: int) -> None:
    """The ratio is the median of those within a round, which other work hits alike."""
    table, rows = [], []
    for name, values in times.items():
        ratios = sorted(a / b for a, b in zip(values, times["chosen"], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"asked": name, "ranks": ranks, "us": statistics.median(values)}
        row |= {"fastest_us": min(values), "ratio": middle}
        rows.append(row)
        table.append(
            (
                name,
                f"{row['us']:.3f}",
                f"{row['fastest_us']:.3f}",
                f"{middle:.3f}",
                f"{low:.3f} - {high:.3f}",
            )
        )
    print_table(("8 B, algorithm", "us", "fastest us", "to chosen", "half of rounds"), table)
    save("all_reduce_asked", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--worker", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory, "rows.json")
        command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
        command += ["--nproc-per-node", str(options.nproc_per_node), __file__, *sys.argv[1:]]
        subprocess.run([*command, "--worker", str(result)], check=True, env=dict(os.environ))
        rows, asked = json.loads(result.read_text())
        report(rows)
        report_asked(asked, options.nproc_per_node)


if __name__ == "__main__":
    main()
