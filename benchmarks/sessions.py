"""What share of a busy machine does a job get? A job that only computes, and one that only calls
all_reduce, beside eight busy sessions: rallypoint's choice of sessions, its alternatives, and
torchrun, in turn. A table on screen, and benchmarks/results/sessions.json.

Times are the workers' own, from when all of them are there: a launcher's start does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from table import save

BUSY = 8
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")

# It ends with this program, however that ends.
SPIN = """
import os
parent = os.getppid()
while os.getppid() == parent:
    for _ in range(1000000):
        pass
"""
# Workers meet in a directory, so that no launcher's store is part of what is measured.
MEET = """
import os, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
directory, amount = sys.argv[1], float(sys.argv[2])
def meet(name):
    open(f"{directory}/{name}.{rank}", "w").close()
    while not all(os.path.exists(f"{directory}/{name}.{i}") for i in range(size)):
        time.sleep(0.005)
"""
COMPUTE = (
    MEET
    + """
def spin(rounds):
    value = 0
    for i in range(rounds):
        value += i * i
meet("up")
begin = time.perf_counter()
spin(int(amount))
meet("done")
if rank == 0:
    print(time.perf_counter() - begin)
"""
)
ALL_REDUCE = (
    MEET
    + """
import numpy, rallypoint as dist
dist.init_process_group()
array = numpy.zeros(2, dtype=numpy.float32)
for _ in range(200):
    dist.all_reduce(array)
end, times = time.perf_counter() + amount, []
go = numpy.ones(1, dtype=numpy.int32)
while True:
    begin = time.perf_counter()
    for _ in range(100):
        dist.all_reduce(array)
    times.append((time.perf_counter() - begin) / 100)
    go[0] = time.perf_counter() < end
    dist.broadcast(go, 0)
    if not go[0]:
        break
if rank == 0:
    print(sum(times) / len(times) * 1e6)
"""
)


def ways(workers: int) -> dict[str, tuple[list[str], dict[str, str]]]:
    """By name, a launcher's command and its variables."""
    scripts = Path(sys.executable).parent
    flags = ["--standalone", "--nproc-per-node", str(workers)]
    ours = [str(scripts / "rallypoint"), "run", *flags]
    found = {
        "rallypoint": (ours, {}),
        "a session each": (ours, {"RALLYPOINT_SESSIONS": "each"}),
    }
    if shutil.which("setpriv") and os.geteuid() == 0:  # else no share is raised anyway
        plain = ["setpriv", "--bounding-set", "-sys_nice", *ours]
        found["unprivileged"] = (plain, {})
        found["one plain session"] = (plain, {"RALLYPOINT_SESSIONS": "one"})
    if (scripts / "torchrun").exists():
        found["torchrun"] = ([str(scripts / "torchrun"), *flags], {})
    return found


@contextlib.contextmanager
def busy(sessions: int) -> Iterator[None]:
    """Other work on the machine, each in a session of its own."""
    running = [
        subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
        for _ in range(sessions)
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(way: tuple[list[str], dict[str, str]], script: str, amount: float) -> float:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "work.py"
        path.write_text(script)
        result = subprocess.run(
            [*way[0], str(path), directory, str(amount)],
            env={**os.environ, **way[1], "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if result.returncode:
        raise SystemExit(f"{way}: {result.stderr}")
    return float(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default=f"{os.cpu_count()},{2 * (os.cpu_count() or 1)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--computing", type=float, default=5e6, help="loops of each worker")
    parser.add_argument("--calling-s", type=float, default=1.0)
    parser.add_argument("--busy", type=int, default=BUSY)
    parser.add_argument("--ways", default="", help="only these, with commas between them")
    options = parser.parse_args()
    results = []
    for workers in map(int, options.workers.split(",")):
        contenders = ways(workers)
        if options.ways:
            contenders = {name: contenders[name] for name in options.ways.split(",")}
        times: dict[tuple[str, str], list[float]] = {}
        with busy(options.busy):
            for _ in range(options.rounds):
                for name, way in contenders.items():
                    took = measure(way, COMPUTE, options.computing)
                    times.setdefault((name, "computing_s"), []).append(took)
                    if name != "torchrun" and options.calling_s:  # the engine is ours only
                        took = measure(way, ALL_REDUCE, options.calling_s)
                        times.setdefault((name, "all_reduce_us"), []).append(took)
        for (name, what), values in times.items():
            row = {"workers": workers, "way": name, "what": what, "busy": options.busy}
            results.append({**row, "median": statistics.median(values), "all": values})
            print(f"{workers} workers, {name:<15} {what:<14} {statistics.median(values):9.2f}")
            print(f"    {' '.join(f'{value:.2f}' for value in values)}", flush=True)
    grouped = AUTOGROUP.exists() and AUTOGROUP.read_text().strip() == "1"
    print(f"autogroups are {'on' if grouped else 'off'}")
    save("sessions", [{**row, "autogroups": grouped} for row in results])


if __name__ == "__main__":
    main()
