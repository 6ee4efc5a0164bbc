"""What the flight record costs an operation: the same calls with it and without it, in turn.

    python benchmarks/flight_record.py [--nproc-per-node 2] [--repeats 600]

8 bytes, float32, SUM. One process holds three groups of all ranks, one that is recorded and two
that are not. The recorded one is measured twice, the second time while its calls are traced, as by
`rallypoint trace` (with nobody who reads them, who would need a core). Each row is over rounds,
which alternate. Calls of a group of one rank tell what the caller pays; those of all ranks what is
left of it beside the wait for peers. The difference between the two that are not recorded (A/A)
says what a difference is worth.

With PyTorch also gloo's calls, with and without what records them: PyTorch's own methods are put
back in turn. The thread that copies PyTorch's recorder runs meanwhile, and has a row of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from table import print_table, save
from workers import answer, is_worker, measured_by

import rallypoint as dist
from rallypoint.base import worker_hook
from rallypoint.engine import communicator, recording
from rallypoint.launch.inspection.tracing import CallTrace

CALLS = 2_000  # short: a round that is not disturbed shall be likely
KINDS = ("without", "again", "with", "traced")
GLOO_CALLS = 100


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
    keep = recording.keep_flight_record
    vars(communicator)["keep_flight_record"] = lambda *_: None
    dist.init_process_group()
    ranks = dist.get_world_size()
    made: dict[str, dict[str, Any]] = {}
    for kind in KINDS[:3]:
        if kind == "with":
            vars(communicator)["keep_flight_record"] = keep
        alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]
        made[kind] = {"all": dist.new_group(), "alone": alone}
    made["traced"] = made["with"]
    return made


def tracing() -> CallTrace | None:
    """The tracing of this process by itself; None: it keeps no record."""
    descriptor, _, offset = worker_hook.flight_record.partition(":")
    if not offset:
        return None
    trace = CallTrace(int(descriptor), int(offset), most=0)
    trace.begin()
    trace.pause()
    return trace


def alternate(
    calls: Mapping[str, Callable[[], Any]],
    repeats: int,
    batch: Callable[[Callable[[], Any]], float],
) -> dict[str, list[float]]:
    """Times of each kind, in rounds of one batch of each, whose order changes."""
    for call in calls.values():
        batch(call)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    trace = tracing()
    for repeat in range(repeats):
        turn = repeat % len(KINDS)
        for kind in KINDS[turn:] + KINDS[:turn]:
            if kind == "traced" and trace is not None:
                trace.go_on()
            times[kind].append(batch(calls[kind]))
            if kind == "traced" and trace is not None:
                trace.pause()
    return times


def gloo_times(repeats: int) -> dict[str, dict[str, list[float]]]:
    """Of gloo's calls; what the thread took is the only time of its kind."""
    import torch
    import torch.distributed as torch_dist

    torch_dist.init_process_group("gloo")
    if not hasattr(torch_dist.Work.wait, "__wrapped__"):
        return {}
    owners = dict.fromkeys(("send", "recv"), torch_dist.ProcessGroup)
    owners["wait"] = torch_dist.Work
    recorded = {name: getattr(owner, name) for name, owner in owners.items()}
    array, other = torch.zeros(2), 1 - torch_dist.get_rank()

    def exchange() -> None:
        if other == 1:
            torch_dist.send(array, 1)
            torch_dist.recv(array, 1)
        elif other == 0:
            torch_dist.recv(array, 0)
            torch_dist.send(array, 0)

    def batch_of(kind: str, call: Callable[[], Any]) -> float:
        for name, method in recorded.items():
            setattr(
                owners[name], name, method if kind in ("with", "traced") else method.__wrapped__
            )
        torch_dist.barrier()
        begin = time.perf_counter()
        for _ in range(GLOO_CALLS):
            call()
        return (time.perf_counter() - begin) / GLOO_CALLS * 1e9

    times = {}
    begin = time.perf_counter()
    for name, call in (
        ("gloo all_reduce", lambda: torch_dist.all_reduce(array)),
        ("gloo send and recv", exchange),
    ):
        kinds = {kind: partial(batch_of, kind, call) for kind in KINDS}
        times[name] = alternate(kinds, repeats, lambda timed: timed())
    share = scribe_ns() / (time.perf_counter() - begin)
    times["scribe, ns per second"] = {
        kind: [share * (kind in ("with", "traced"))] * 2 for kind in KINDS
    }
    torch_dist.destroy_process_group()
    return times


def scribe_ns() -> float:
    """Time on a core of the thread that copies PyTorch's recorder."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text() == "rally-scribe\n":
            return float((task / "schedstat").read_text().split()[0])
    return 0.0


def worker(options: argparse.Namespace) -> None:
    made = groups()
    array = np.zeros(2, np.float32)
    times: dict[str, dict[str, list[float]]] = {}
    for scope in ("alone", "all"):
        calls = {kind: partial(dist.all_reduce, array, group=made[kind][scope]) for kind in KINDS}
        times[scope] = alternate(calls, options.repeats, batch_ns)
    if importlib.util.find_spec("torch") and dist.get_world_size() == 2:
        times |= gloo_times(options.repeats)
    if dist.get_rank() == 0:
        answer([dist.get_world_size(), times])
    dist.barrier()
    dist.destroy_process_group()


def report(ranks: int, times: dict[str, dict[str, list[float]]]) -> None:
    table, rows = [], []
    for scope, by_kind in times.items():
        without, again, recorded, traced = (by_kind[kind] for kind in KINDS)
        tracing_ns = statistics.median(b - a for a, b in zip(recorded, traced, strict=True))
        costs = [b - a for a, b in zip(without, recorded, strict=True)]
        same = statistics.median(b - a for a, b in zip(without, again, strict=True))
        low, middle, high = statistics.quantiles(costs, n=4)
        medians = [statistics.median(without), statistics.median(recorded)]
        best = min(recorded) - min(without)
        name = {"alone": "1 rank", "all": f"{ranks} ranks"}.get(scope, scope)
        rows.append(
            {
                "calls": name,
                "without_ns": medians[0],
                "with_ns": medians[1],
                "cost_ns": middle,
                "a_to_a_ns": same,
                "cost_of_fastest_ns": best,
                "tracing_ns": tracing_ns,
            }
        )
        table.append(
            (
                name,
                f"{medians[0]:.0f}",
                f"{medians[1]:.0f}",
                f"{middle:.0f}",
                f"{same:.0f}",
                f"{low:.0f} - {high:.0f}",
                f"{best:.0f}",
                f"{tracing_ns:.0f}",
            )
        )
    columns = (
        "calls",
        "without ns",
        "with ns",
        "cost ns",
        "A/A ns",
        "half of rounds",
        "fastest",
        "tracing ns",
    )
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
