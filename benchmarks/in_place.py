"""How long do ranks that outlive a loss stand still, and what does it cost to be ready for it?

Times are those of the killer's clock: from the signal, or the cable that is pulled, to the first
right all_reduce of the last survivor. Victims are drawn at random; what got stuck is told, and not
repeated. A table, and JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
from collections.abc import Callable

from in_place_costs import measure_transfer, measure_update
from in_place_goodput import goodput, leaks
from in_place_recovery import (
    HOSTS_PER_JOB,
    KILLS_PER_JOB,
    SHORT_SILENCE,
    SPARE_S,
    Case,
    in_jobs,
    kill_hosts,
    kill_workers,
    one_host,
    pull_cable,
    three_hosts,
)
from table import human_bytes, print_table, save
from workers import is_worker, measured_by, measured_on

from hosts import Hosts, why_not

Rows = list[dict[str, object]]
Measure = Callable[[argparse.Namespace, random.Random], Rows]


def one_host_cases(options: argparse.Namespace, chance: random.Random) -> Rows:
    """4 ranks on one host lose one: any; rank 0; any while a spare waits. Then it is replaced."""
    worker = ["--bytes", str(options.bytes)]
    any_rank, first = Case("any of 4"), Case("rank 0 of 4")
    for count in in_jobs(options.trials, KILLS_PER_JOB):
        with one_host(4, worker=worker) as job:
            kill_workers(job, any_rank, count, chance)
        with one_host(4, worker=worker) as job:
            kill_workers(job, first, count, chance, rank=0)
    spare = Case("any of 4, a spare waits")
    with one_host(4, spares=1, worker=worker) as job:
        kill_workers(job, spare, options.trials, chance, pause_s=SPARE_S)
    return [state_row(options) | each.row() for each in (any_rank, first, spare)]


def torch_cases(options: argparse.Namespace, chance: random.Random) -> Rows:
    """4 ranks with PyTorch on one host lose one, which is replaced: by an import, or by a fork."""
    cases = []
    for name, flags in (("imports", []), ("--preload torch", ["--preload", "torch"])):
        cases.append(Case(name))
        with one_host(4, worker=["--torch"], flags=flags) as job:
            # Of three newcomers lost within ten seconds, the next one would wait.
            kill_workers(job, cases[-1], options.trials, chance, pause_s=5.0)
    return [each.row() for each in cases]


def host_cases(options: argparse.Namespace, chance: random.Random) -> Rows:
    """3 hosts of 2 ranks lose a rank, or all the processes of a host."""
    worker = ["--bytes", str(options.bytes)]
    any_rank, first = Case("any of 3 x 2"), Case("rank 0 of 3 x 2")
    host, spare = Case("a host of 3"), Case("any of 3 x 2, spares wait")
    for count in in_jobs(options.trials, KILLS_PER_JOB):
        with three_hosts(worker=worker) as (job, _):
            kill_workers(job, any_rank, count, chance)
        with three_hosts(worker=worker) as (job, _):
            kill_workers(job, first, count, chance, rank=0)
    for count in in_jobs(options.trials, HOSTS_PER_JOB):
        with three_hosts(worker=worker) as (job, _):
            kill_hosts(job, host, count, chance)
    with three_hosts(spares=1, worker=worker) as (job, _):
        kill_workers(job, spare, options.trials, chance, pause_s=SPARE_S)
    return [state_row(options) | each.row() for each in (any_rank, first, host, spare)]


def state_row(options: argparse.Namespace) -> dict[str, object]:
    """What the ranks hold when one is lost."""
    return {"state": human_bytes(options.bytes), "pages": options.pages}


def update_cost(options: argparse.Namespace, _: random.Random) -> Rows:
    """What update() adds to a step, with a small and a large state, and while a spare waits."""
    if is_worker():
        measure_update(options)
        return []
    rows: Rows = []
    for ranks in options.ranks:
        for spares in (0, 1):
            flags = ["--max-restarts", "1", "--spares", str(spares)]
            us = measured_by(ranks, *flags)
            row = {"ranks": ranks, "spares": spares, "state": human_bytes(options.bytes)}
            rows.append({**row, **{f"{name}_us": each for name, each in us.items()}})
    return rows


def transfer_cost(options: argparse.Namespace, _: random.Random) -> Rows:
    """The state of the other ranks to the last one: on one host, and from another."""
    if is_worker():
        measure_transfer(options)
        return []
    rows = [transfer_row(f"{ranks - 1} here", measured_by(ranks)) for ranks in options.ranks]
    reason = why_not()
    if reason:
        print(f"between hosts is not measured: {reason}")
    else:
        with Hosts(2) as hosts:
            rows.append(transfer_row("1 elsewhere", measured_on(hosts)))
    return rows


def goodput_cases(options: argparse.Namespace, chance: random.Random) -> Rows:
    """Faults that come often, or very often: the part of the possible steps that is done."""
    arguments = {"duration_s": options.duration_s, "chance": chance}
    return [
        goodput(every_s=29.0, step_s=0.1, stops=options.stops, **arguments),
        goodput(every_s=1.0, step_s=0.1, stops=False, **arguments),
    ]


def leak_cases(options: argparse.Namespace, chance: random.Random) -> Rows:
    """Descriptors, maps, threads and memory of processes that outlive many losses."""
    return leaks(options.trials, chance)


def transfer_row(sources: str, times: dict[str, list[float]]) -> dict[str, object]:
    """Medians in milliseconds, and ratios of them."""
    one, many, bare = (statistics.median(each) * 1e3 for each in times.values())
    row: dict[str, object] = {"sources": sources, "one_ms": one, "many_ms": many, "bare_ms": bare}
    return {**row, "speed_of_bare": bare / one, "many_to_one": many / one}


def cable_cases(options: argparse.Namespace, chance: random.Random) -> Rows:
    """3 hosts of 2 ranks: one is cut off, then the one where the coordinator is."""
    other, coordinator = Case("a cable of 3"), Case("the coordinator's cable")
    for _ in range(options.trials):
        with three_hosts(conf=SHORT_SILENCE) as (job, hosts):
            if pull_cable(job, hosts, other, chance.choice((2, 3)), chance):
                pull_cable(job, hosts, coordinator, 1, chance)
    return [other.row(), coordinator.row()]


MEASURES: dict[str, tuple[Measure, str]] = {
    "one-host": (one_host_cases, "kill -9 of one of 4 ranks on one host"),
    "torch": (torch_cases, "the same with PyTorch, which newcomers import or, forked, have"),
    "hosts": (host_cases, "kill -9 of a rank, or of all that runs on one of 3 hosts"),
    "cable": (cable_cases, f"a cable is pulled, with {SHORT_SILENCE}"),
    "update": (update_cost, "what update() costs where nothing fails"),
    "goodput": (goodput_cases, "steps that are done while ranks are killed or stopped"),
    "leaks": (leak_cases, "what survivors of many losses hold"),
    "transfer": (transfer_cost, "how fast a newcomer gets the state"),
}


def show(rows: Rows) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"
        return "-" if value is None else str(value)

    print_table(
        [name.replace("_", " ") for name in columns],
        [[cell(row.get(name)) for name in columns] for row in rows],
    )


def add_cost_options(parser: argparse.ArgumentParser, size: int) -> None:
    ranks = [1, 2, 4] if size < 1 << 30 else [2, 4]
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each")
    parser.add_argument("--bytes", type=int, default=size, help="of the state")
    parser.add_argument("--arrays", type=int, default=4000, help="of the state, where many")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--no-results", action="store_true", help="do not write the JSON file")
    what = parser.add_subparsers(dest="what", required=True)
    for name, (_, text) in MEASURES.items():
        one = what.add_parser(name, help=text, description=text)
        if name in ("update", "transfer"):
            add_cost_options(one, size=100 << 20 if name == "update" else 1 << 30)
        elif name == "goodput":
            one.add_argument("--duration-s", type=float, default=600.0, help="of each case")
            one.add_argument("--stops", action="store_true", help="also SIGSTOP, at 29 s")
        else:
            one.add_argument("--trials", type=int, default=30, help="of each case")
        if name in ("one-host", "hosts"):
            one.add_argument("--bytes", type=int, default=80, help="of each rank's state")
            one.add_argument("--pages", choices=("small", "huge"), default="small", help="of it")
    options = parser.parse_args()
    if is_worker():
        MEASURES[options.what][0](options, random.Random(options.seed))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and what was started ends with us
    needs_hosts = options.what in ("hosts", "cable")
    reason = why_not() if needs_hosts else ""
    if reason:
        raise SystemExit(f"{options.what} needs test hosts: {reason}")
    if getattr(options, "pages", "") == "small":
        os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"  # NumPy asks for huge ones otherwise
    print(f"seed {options.seed}; load average {os.getloadavg()[0]:.1f}", flush=True)
    rows = MEASURES[options.what][0](options, random.Random(options.seed))
    show(rows)
    print(f"load average at the end {os.getloadavg()[0]:.1f}")
    if any(row.get("stuck") or row.get("moved") for row in rows):
        raise SystemExit("a job did not go on, or survivors lost their memory")
    if not options.no_results:
        save(f"in_place_{options.what}", rows)


if __name__ == "__main__":
    main()
