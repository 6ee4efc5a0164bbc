"""How long until the survivors of a death reduce again? From kill -9 of one of four processes to a
correct all_reduce at all others, which keep their processes: by forming the default group again,
and by shrink_group. A table, and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from table import print_table, save

from rallypoint.store.server import StoreServer

RANKS = 4
WAYS = ("reform", "shrink")
TARGET_MS = 30

# Tells when its call failed, when it had a group again, and when that had reduced.
SCRIPT = """
import json, os, sys, time
from datetime import timedelta
import numpy as np
import rallypoint as dist
from rallypoint.process_group.formation.joining import reform_world
from rallypoint.store.init_method import JoinedStore
wait = timedelta(seconds=60)
dist.init_process_group(timeout=wait)
group = dist.group.WORLD
me, value, large = dist.get_rank(), np.zeros(100), np.ones(1 << 20)
print(json.dumps({"pid": os.getpid()}), flush=True)
try:
    while True:
        dist.all_reduce(large, dist.ReduceOp.MAX)
        dist.broadcast(value, src=1)
        dist.barrier()
except dist.PeerLostError as error:
    failed = time.monotonic()
    kept = [rank for rank in range(4) if rank not in error.lost]
if sys.argv[1] == "shrink":
    dist.shrink_group()
else:
    place = JoinedStore(store=group.world.store, rank=kept.index(me), world_size=3)
    reform_world(group, place, "after", timeout=wait)
formed = time.monotonic()
value[:] = 10 ** me
dist.all_reduce(value)
good = time.monotonic()
assert (value == sum(10 ** rank for rank in kept)).all()
print(json.dumps({"failed": failed, "formed": formed, "good": good}), flush=True)
dist.destroy_process_group()
"""


def trial(way: str, chance: random.Random) -> dict[str, float]:
    """Milliseconds from the kill until the last survivor had its error, its group and its sum."""
    with StoreServer() as server:
        given = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)},
            **{"WORLD_SIZE": str(RANKS), "TORCHELASTIC_USE_AGENT_STORE": "True"},
            "OMP_NUM_THREADS": "1",
        }
        members = [
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT, way],
                env={**given, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        for each in members:
            _told(each)
        time.sleep(chance.uniform(0.05, 0.2))
        victim = members.pop(chance.randrange(RANKS))
        killed = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        told = [_told(each) for each in members]
        for each in (*members, victim):
            each.communicate()
    return {
        name: 1e3 * (max(each[name] for each in told) - killed)
        for name in ("failed", "formed", "good")
    }


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a rank failed; see its error above")
    found: dict[str, Any] = json.loads(line)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    chance = random.Random(given.seed)
    print(f"seed {given.seed}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(given.trials):
        for way in WAYS:
            found[way].append(trial(way, chance))
    rows: list[dict[str, Any]] = []
    for way, times in found.items():
        for name in ("failed", "formed", "good"):
            values = sorted(each[name] for each in times)
            p95 = values[min(len(values) - 1, int(0.95 * len(values)))]
            row: dict[str, Any] = {"way": way, "until": name, "kills": len(values)}
            row |= {"median_ms": statistics.median(values), "p95_ms": p95, "max_ms": values[-1]}
            rows.append(row)
    numbers = ("median_ms", "p95_ms", "max_ms")
    cells = [
        [row["way"], row["until"], *(f"{row[number]:.1f}" for number in numbers)] for row in rows
    ]
    print_table(("way", "kill until", "median ms", "p95", "max"), cells)
    ours = next(row for row in rows if (row["way"], row["until"]) == ("reform", "good"))
    verdict = "met" if ours["median_ms"] <= TARGET_MS else "MISSED"
    print(f"\nmedian {ours['median_ms']:.1f} ms (target: {TARGET_MS} ms): {verdict}")
    save("reform", rows)


if __name__ == "__main__":
    main()
