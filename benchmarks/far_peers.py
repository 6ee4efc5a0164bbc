"""How a group of many hosts forms and ends, on one machine: each rank is a host of its own.

    python benchmarks/far_peers.py [--ranks 256] [--eager] [--end]

Prints how long it takes to form, how many descriptors a rank has then and after an all_reduce, and
after how long each rank knows that another one was killed, while it waits for a third one. With
--eager each rank is connected with each from the start, as in groups of few hosts. With --end the
ranks that know of it end at once, as most programs would, which delays those that do not know yet.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable

WORKER = """
import os, sys, time
began = time.time()
import numpy as np, rallypoint as dist
from datetime import timedelta

def tell(*words):
    print(*words, flush=True)

dist.init_process_group("tcp", timeout=timedelta(seconds=300))
rank, ranks = dist.get_rank(), dist.get_world_size()
descriptors = lambda: len(os.listdir("/proc/self/fd"))
tell("formed", time.time(), descriptors())
for count in (2, 2, 65536):
    array = np.full(count, float(rank))
    at = time.perf_counter()
    dist.all_reduce(array)
    assert (array == ranks * (ranks - 1) / 2).all()
    took = time.perf_counter() - at
    tell("reduced", count * 8, took, descriptors())
dist.barrier()
tell("ready", os.getpid(), descriptors())
try:
    if rank == ranks // 3: time.sleep(1000)
    dist.recv(np.zeros(1), 0 if rank else None)
except dist.PeerLostError as error:
    tell("lost", time.time(), error.rank)
    if sys.argv[1] == "stay": time.sleep(1000)
"""


def begin(ranks: int, directory: str, *, eager: bool, end: bool) -> list[subprocess.Popen[str]]:
    """The ranks; rank 0 has the store. To end takes each some 30 ms of a core, unless it stays."""
    environ = {
        **os.environ,
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29631",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "RALLYPOINT_EAGER_HOSTS": str(ranks if eager else 2),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, "end" if end else "stay"],
            env=environ | {"RANK": str(rank)},
            cwd=directory,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def lines(processes: Iterable[subprocess.Popen[str]], what: str) -> list[list[str]]:
    """The next line of each, which begins with `what`."""
    found = []
    for process in processes:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words[:1] == [what], words
        found.append(words[1:])
    return found


def spread(values: Iterable[float]) -> str:
    """The median, and the largest."""
    known = list(values)
    return f"median {statistics.median(known):.3g}, most {max(known):.3g}"


def main() -> None:
    """Run the ranks, and kill one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--end", action="store_true")
    options = parser.parse_args()
    began = time.time()
    with tempfile.TemporaryDirectory() as directory:
        processes = begin(options.ranks, directory, eager=options.eager, end=options.end)
        try:
            report(processes, began)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def report(processes: list[subprocess.Popen[str]], began: float) -> None:
    """What the ranks tell."""
    formed = lines(processes, "formed")
    print(f"formed after {max(float(when) for when, _ in formed) - began:.1f} s")
    print(f"  descriptors: {spread(int(count) for _, count in formed)}")
    for _ in range(3):
        reduced = lines(processes, "reduced")
        times = spread(float(took) for _, took, _ in reduced)
        print(f"all_reduce of {reduced[0][0]} bytes: {times} s")
        print(f"  descriptors: {spread(int(count) for *_, count in reduced)}")
    ready = lines(processes, "ready")
    time.sleep(2)
    victim = len(processes) // 3
    os.kill(int(ready[victim][0]), signal.SIGKILL)
    killed = time.time()
    lost = lines([each for each in processes if each is not processes[victim]], "lost")
    assert {int(rank) for _, rank in lost} == {victim}
    took = spread(float(at) - killed for at, _ in lost)
    print(f"a death was told to {len(lost)} ranks: {took} s")


if __name__ == "__main__":
    main()
