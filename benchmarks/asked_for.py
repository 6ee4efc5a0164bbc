"""What it costs to ask for an algorithm: 8 bytes by the same program, however it was named.

    python benchmarks/asked_for.py [--nproc-per-node 2]

It is chosen by us; the same with another keyword (which Python does not pass for nothing); named;
or from a file of one's own. Other sizes, operations and peers: `rallypoint bench`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from table import print_table, save
from workers import answer, is_worker, measured_by

import rallypoint as dist

REPEATS = 45
BATCH_S = 0.01
OWN_FILE = """
from rallypoint.schedule.algorithms import direct

def own(team):
    return direct.all_reduce_one_shot(team.ranks)
"""


def batch_us(call: Callable[[], Any], calls: int) -> float:
    """Mean time of a call in microseconds; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls * 1e6


def calls_for(call: Callable[[], Any]) -> int:
    """How many calls take about BATCH_S: the same number on every rank, rank 0's."""
    call()
    once_us = batch_us(call, 5)
    count = np.array([max(3, min(20_000, int(BATCH_S * 1e6 / once_us)))])
    dist.broadcast(count, src=0)
    return int(count[0])


def asked_for() -> dict[str, list[float]]:
    """Microseconds of a call of 8 bytes, by who says which algorithm; round by round."""
    array = np.zeros(2, np.float32)
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "own.py")
        file.write_text(OWN_FILE)
        op, name = dist.ReduceOp.SUM, str(file)
        contenders: dict[str, Callable[[], Any]] = {
            "chosen": lambda: dist.all_reduce(array),
            "with op=": lambda: dist.all_reduce(array, op=op),
            "by name": lambda: dist.all_reduce(array, algorithm="direct_one_shot"),
            "own file": lambda: dist.all_reduce(array, algorithm=name),
        }
        for call in contenders.values():
            call()
    calls = calls_for(contenders["chosen"])
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(REPEATS):
        for name in order:
            times[name].append(batch_us(contenders[name], calls))
        order = [*order[1:], order[0]]
    return times


def worker() -> None:
    dist.init_process_group()
    times = asked_for()
    if dist.get_rank() == 0:
        answer(times)
    dist.destroy_process_group()


def report(times: dict[str, list[float]], ranks: int) -> None:
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
    save("asked_for", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    options = parser.parse_args()
    if is_worker():
        worker()
    else:
        report(measured_by(options.nproc_per_node), options.nproc_per_node)


if __name__ == "__main__":
    main()
