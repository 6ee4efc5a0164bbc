"""What the flight record costs an operation: the same calls with it and without it, in turn.

    python benchmarks/flight_record.py [--nproc-per-node 2] [--repeats 600]

8 bytes, float32, SUM. One process holds two groups of all ranks, one that is recorded and one that
is not, made in either order in turn; each row is over rounds, which alternate. Calls of a group of
one rank tell what the caller pays; those of all ranks what is left of it beside the wait for peers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from table import print_table, save
from workers import answer, is_worker, measured_by

import rallypoint as dist
from rallypoint.engine import communicator as engine

CALLS = 2_000  # short: a round that is not disturbed shall be likely
KINDS = ("without", "with")


def batch_ns(call: Callable[[], Any]) -> float:
    """Mean time of a call; all ranks begin together."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - begin) / CALLS * 1e9


def groups() -> dict[str, dict[str, Any]]:
    """By whether they are recorded: a group of all ranks, and one of this rank alone.

    The record is opened with the first communicator that asks for it; groups made before have none.
    """
    keep, engine.keep_flight_record = engine.keep_flight_record, lambda *_: None
    dist.init_process_group()
    ranks = dist.get_world_size()
    made: dict[str, dict[str, Any]] = {}
    for kind in KINDS:
        if kind == "with":
            engine.keep_flight_record = keep
        alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]
        made[kind] = {"all": dist.new_group(), "alone": alone}
    return made


def worker(options: argparse.Namespace) -> None:
    made = groups()
    array = np.zeros(2, np.float32)
    times: dict[str, dict[str, list[float]]] = {}
    for scope in ("alone", "all"):
        calls = {
            kind: lambda g=made[kind][scope]: dist.all_reduce(array, group=g) for kind in KINDS
        }
        for call in calls.values():
            batch_ns(call)
        times[scope] = {kind: [] for kind in KINDS}
        for repeat in range(options.repeats):
            for kind in KINDS if repeat % 2 else reversed(KINDS):
                times[scope][kind].append(batch_ns(calls[kind]))
    if dist.get_rank() == 0:
        answer([dist.get_world_size(), times])
    dist.barrier()
    dist.destroy_process_group()


def report(ranks: int, times: dict[str, dict[str, list[float]]]) -> None:
    table, rows = [], []
    for scope, by_kind in times.items():
        without, recorded = (by_kind[kind] for kind in KINDS)
        costs = [b - a for a, b in zip(without, recorded, strict=True)]
        low, middle, high = statistics.quantiles(costs, n=4)
        medians = [statistics.median(without), statistics.median(recorded)]
        best = min(recorded) - min(without)
        count = ranks if scope == "all" else 1
        rows.append(
            {
                "ranks": count,
                "without_ns": medians[0],
                "with_ns": medians[1],
                "cost_ns": middle,
                "cost_of_fastest_ns": best,
            }
        )
        table.append(
            (
                str(count),
                f"{medians[0]:.0f}",
                f"{medians[1]:.0f}",
                f"{middle:.0f}",
                f"{low:.0f} - {high:.0f}",
                f"{best:.0f}",
            )
        )
    columns = ("ranks", "without ns", "with ns", "cost ns", "half of rounds", "of the fastest")
    print_table(columns, table)
    save("flight_record", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=600)
    options = parser.parse_args()
    if is_worker():
        worker(options)
    else:
        report(*measured_by(options.nproc_per_node))


if __name__ == "__main__":
    main()
