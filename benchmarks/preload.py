"""What does it save to import PyTorch once? A job that forms a group and does one all_reduce, from
start to there, with its CPU seconds; and from kill -9 of one rank to the next round's all_reduce:
torchrun with gloo, `rallypoint run` with and without --preload, in turn. A table, and JSON.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import print_table, save

# Each rank 0 adds the time of its first all_reduce; rank 1 of the first rounds kills itself.
SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist
backend, path, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
dist.init_process_group(backend)
dist.all_reduce(torch.ones(1000))
rank = dist.get_rank()
if rank == 0:
    with open(path, "a") as file:
        file.write(f"reduced {time.time()}\\n")
dist.barrier()
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < kills:
    time.sleep(1)
    if rank == 1:
        with open(path, "a") as file:
            file.write(f"killed {time.time()}\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
time.sleep(1)  # a group of gloo fails if another rank ends too soon
os._exit(0)
"""
LIMIT_S = 120.0
# The launcher and its flags, and the backend.
WAYS = {
    "torchrun, gloo": (("torchrun",), "gloo"),
    "rallypoint run, gloo": (("rallypoint", "run"), "gloo"),
    "rallypoint run": (("rallypoint", "run"), "rallypoint"),
    "--preload torch, gloo": (("rallypoint", "run", "--preload", "torch"), "gloo"),
    "--preload torch": (("rallypoint", "run", "--preload", "torch"), "rallypoint"),
}


def run(way: str, workers: int, kills: int) -> tuple[float, float, list[float]] | None:
    """Seconds to the first all_reduce, CPU seconds of the job, and seconds after each kill.

    None: the job failed, or hung: with gloo, restarted ranks do so now and then.
    """
    (program, *flags), backend = WAYS[way]
    start = ["-m", "torch.distributed.run"] if program == "torchrun" else ["-m", program]
    with tempfile.TemporaryDirectory() as directory:
        script, times = Path(directory) / "script.py", Path(directory) / "times"
        script.write_text(SCRIPT)
        # On a busy machine, gloo's ranks may fail once more when others have ended.
        numbers = ["--nproc-per-node", str(workers), "--max-restarts", str(kills + 3)]
        words = ["--standalone", *numbers, str(script), backend, str(times), str(kills)]
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.time()
        command = [sys.executable, *start, *flags, *words]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            status = job.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            job.terminate()
            job.wait()
            return None
        if status:
            return None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        events = [line.split() for line in times.read_text().splitlines()]
    first, *others = [float(at) for what, at in events if what == "reduced"]
    killed = [float(at) for what, at in events if what == "killed"]
    gaps = [back - lost for lost, back in zip(killed, others, strict=False)]
    return first - began, cpu_s, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="jobs of each launcher")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kills", type=int, default=3, help="in each job after the first start")
    given = parser.parse_args()
    rows = []
    for workers in given.workers:
        starts: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        gaps: dict[str, list[float]] = {way: [] for way in WAYS}
        failed = dict.fromkeys(WAYS, 0)
        for turn in range(given.rounds):
            for way in WAYS if turn % 2 == 0 else reversed(WAYS):
                if started := run(way, workers, 0):
                    starts[way].append(started[:2])
                restarted = run(way, workers, given.kills) if given.kills else started
                gaps[way] += restarted[2] if restarted else []
                failed[way] += (not started) + (not restarted)
        for way in WAYS:
            walls, cpus = zip(*starts[way], strict=True)
            row = {"way": way, "workers": workers, "start_s": statistics.median(walls)}
            row |= {"cpu_s": statistics.median(cpus), "start_min_s": min(walls)}
            row |= {"failed": failed[way]}
            if gaps[way]:
                row |= {"restart_s": statistics.median(gaps[way]), "restart_min_s": min(gaps[way])}
            rows.append(row)
    print(f"to the first all_reduce; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs\n")
    names = ("start_s", "start_min_s", "cpu_s", "restart_s", "restart_min_s")
    table = [
        [str(row["way"]), str(row["workers"])]
        + [f"{row[name]:.3f}" if name in row else "-" for name in names]
        + [str(row["failed"])]
        for row in rows
    ]
    columns = (
        "launcher, backend",
        "ranks",
        "start s",
        "min",
        "CPU s",
        "after a kill s",
        "min",
        "failed",
    )
    print_table(columns, table)
    save("preload", rows)


if __name__ == "__main__":
    main()
