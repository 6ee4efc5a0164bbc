"""Many ranks on one machine: what a group and an all_reduce take beyond their interpreters.

    python benchmarks/many_ranks.py [--ranks 256] [--repeats 1]

Starts the ranks with `rallypoint run` twice: once they only import NumPy, once they also form a
process group and run an all_reduce. Told are, for each, the wall time until the last rank is done,
the CPU time of all ranks, and their memory: the sum of what /proc/PID/smaps_rollup calls Pss, which
counts what several share once. On a machine that does other things the CPU time over the cores is
the better figure for time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from table import print_table, save

LOOK_S = 0.1
PATIENCE_S = 600


def wait_until(done: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > end_s:
            raise SystemExit("the ranks did not get there")
        time.sleep(LOOK_S)


def pss_kib() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def worker(directory: Path, kind: str) -> None:
    import numpy as np

    rank = os.environ["RANK"]
    if kind == "all_reduce":
        import rallypoint as dist

        dist.init_process_group()
        array = np.ones(1000, np.float32)
        dist.all_reduce(array)
        assert (array == dist.get_world_size()).all()
    done_s = time.monotonic()
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = used.ru_utime + used.ru_stime
    (directory / f"done.{rank}").touch()
    wait_until((directory / "measure").exists)
    told = {"done_s": done_s, "cpu_s": cpu_s, "pss_kib": pss_kib()}
    (directory / f"told.{rank}.part").write_text(json.dumps(told))
    (directory / f"told.{rank}.part").rename(directory / f"told.{rank}")
    wait_until((directory / "end").exists)


def all_have_written(directory: Path, name: str, ranks: int) -> bool:
    return len([p for p in directory.glob(name) if p.suffix != ".part"]) == ranks


def measure(kind: str, ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        command = [sys.executable, "-m", "rallypoint", "run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, "--worker", path, "--kind", kind]
        begin_s = time.monotonic()
        with subprocess.Popen(command) as launcher:
            for name, then in (("done.*", "measure"), ("told.*", "end")):
                wait_until(partial(all_have_written, directory, name, ranks))
                (directory / then).touch()
            told = [json.loads(path.read_text()) for path in directory.glob("told.*")]
        if launcher.returncode != 0:
            raise SystemExit(f"the launcher ended with {launcher.returncode}")
    return {
        "wall_s": max(each["done_s"] for each in told) - begin_s,
        "cpu_s": sum(each["cpu_s"] for each in told),
        "pss_mib": sum(each["pss_kib"] for each in told) / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.kind)
        return
    seen: dict[str, list[dict[str, float]]] = {"numpy": [], "all_reduce": []}
    for _ in range(options.repeats):
        for kind, rows in seen.items():
            rows.append(measure(kind, options.ranks))
    medians = {
        kind: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for kind, rows in seen.items()
    }
    medians["beyond"] = {
        name: medians["all_reduce"][name] - value for name, value in medians["numpy"].items()
    }
    cores = len(os.sched_getaffinity(0))
    print_table(
        (f"{options.ranks} ranks", "wall s", "CPU s", "CPU s / cores", "Pss MiB"),
        [
            (
                kind,
                f"{row['wall_s']:.1f}",
                f"{row['cpu_s']:.1f}",
                f"{row['cpu_s'] / cores:.1f}",
                f"{row['pss_mib']:.0f}",
            )
            for kind, row in medians.items()
        ],
    )
    save(
        "many_ranks",
        [{"kind": kind, "ranks": options.ranks, **row} for kind, row in medians.items()],
    )


if __name__ == "__main__":
    main()
