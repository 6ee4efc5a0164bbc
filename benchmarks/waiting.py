"""Ranks that wait: on one core, on two, with more ranks than cores, and for a late peer.

    python benchmarks/waiting.py [--vs mpich,openmpi,intelmpi] [--rounds 5]

The kernel may put two ranks on one core although there is another; here they put themselves there,
once their library has started and believes that each has its own. Told are, by turns and as medians
of all rounds, the time of an all_reduce of 8 bytes

    together   two ranks on one core
    apart      two ranks, a core each
    crowded    four ranks on two cores, wherever the kernel puts them

and, with two ranks apart, of which one comes 5 ms late to each call, the share of a core that the
other one uses while it waits. The MPIs are those of `rallypoint bench --get-mpi`.
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
from typing import TYPE_CHECKING, Any

from table import print_table, save

if TYPE_CHECKING:  # the MPIs' environments have nothing of ours
    from rallypoint.lab.bench.contenders import Environments

CASES = {"together": 2, "apart": 2, "crowded": 4, "late": 2}
CALLS, TURNS, LATE_CALLS, LATE_S = 200, 5, 60, 0.005


def stay_on(cores: set[int]) -> None:
    """All threads of this process."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def worker(case: str) -> None:
    """One rank; rank 0 prints its figure."""
    import numpy as np

    array = np.zeros(1)
    if "RALLYPOINT_BENCH_MPI" in os.environ:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank = world.Get_rank()

        def call() -> None:
            world.Allreduce(MPI.IN_PLACE, array)
    else:
        import rallypoint as dist

        dist.init_process_group()
        rank = dist.get_rank()

        def call() -> None:
            dist.all_reduce(array)

    call()
    if case != "crowded":
        stay_on({0 if case == "together" else rank})
    figure = share_of_a_core(call, rank) if case == "late" else time_of(call)
    if rank == 0:
        print(json.dumps(figure), flush=True)
    call()


def time_of(call: Callable[[], None]) -> float:
    """The median time of a call, in us."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - begin) / CALLS)
    return statistics.median(times)


def share_of_a_core(call: Callable[[], None], rank: int) -> float:
    """What the rank that waits uses, in per cent."""
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(LATE_CALLS):
        if rank != 0:
            time.sleep(LATE_S)
        call()
    return 100 * (time.process_time() - used) / (time.perf_counter() - begin)


def measure(name: str, case: str, environments: Environments) -> float:
    ranks = str(CASES[case])
    own = [__file__, "--worker", case]
    environ = dict(os.environ)
    if name == "rallypoint":
        command = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", ranks, *own]
    else:
        prefix = environments.find(name)
        environ |= {"PATH": f"{prefix / 'bin'}:{environ['PATH']}", "RALLYPOINT_BENCH_MPI": "1"}
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        environ |= {"I_MPI_PIN": "off", "PYTHONPATH": str(Path(__file__).parent)}
        start = [str(prefix / "bin" / "mpiexec"), "-n", ranks]
        if name == "openmpi":
            start += ["--bind-to", "none", "--oversubscribe"]
        command = [*start, str(prefix / "bin" / "python"), *own]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        raise SystemExit(f"{name}, {case}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vs", default="mpich,openmpi,intelmpi")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", choices=CASES)
    given = parser.parse_args()
    if given.worker:
        return worker(given.worker)
    from rallypoint.base.errors import HostError
    from rallypoint.lab.bench.contenders import Environments, default_cache

    environments = Environments({}, default_cache(), make=False)
    names = ["rallypoint"]
    for name in filter(None, given.vs.split(",")):
        try:
            environments.find(name)
            names.append(name)
        except HostError as error:
            print(error, file=sys.stderr)
    found: dict[tuple[str, str], list[float]] = {}
    for turn in range(given.rounds):
        first = turn % len(names)
        for case in CASES:
            for name in names[first:] + names[:first]:
                found.setdefault((case, name), []).append(measure(name, case, environments))
    rows: list[dict[str, Any]] = [
        {"case": case, "library": name, "ranks": CASES[case], "values": values}
        for (case, name), values in found.items()
    ]
    units = {case: "% of a core" if case == "late" else "us" for case in CASES}
    print_table(
        ["case", *names, "unit"],
        [
            [case, *(f"{statistics.median(found[case, name]):.2f}" for name in names), units[case]]
            for case in CASES
        ],
    )
    save("waiting", rows)


if __name__ == "__main__":
    main()
