"""How long does it take to simulate an all_reduce of tens of thousands of ranks? Ring and double
binary tree, 8 B and 256 MiB, six ranks to a node, on the links of Summit: from nothing to times.

    python benchmarks/simulation.py --ranks 24576 100000
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from table import human_bytes, print_table, save

from rallypoint.schedule.catalogue import build
from rallypoint.schedule.cost.links import read_model
from rallypoint.schedule.cost.simulation import Simulation
from rallypoint.schedule.program import Collective

TARGET_RANKS, TARGET_S, TARGET_BYTES = 24_576, 5.0, 1 << 30
SIZES = (8, 256 << 20)
PER_NODE = 6


def measure(ranks: int) -> dict[str, float]:
    """Simulate in this process."""
    began, began_cpu = time.perf_counter(), time.process_time()
    model, row = read_model("summit"), {"ranks": float(ranks)}
    for name in ("ring", "double_tree"):
        program = build(Collective.ALL_REDUCE, name, ranks=ranks, per_node=PER_NODE)
        simulation = Simulation(program, model.links("Simple", name).on(PER_NODE))
        for nbytes in SIZES:
            row[f"{name} {human_bytes(nbytes)} ms"] = simulation.run(nbytes).time_us / 1e3
    row["s"] = time.perf_counter() - began
    row["cpu_s"] = time.process_time() - began_cpu
    row["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[24_576, 99_996])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.ranks[0])))
        return
    rows = []
    for ranks in options.ranks:
        command = [sys.executable, __file__, "--one", "--ranks", str(ranks)]
        runs = [
            json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            for _ in range(options.repeats)
        ]
        rows.append(sorted(runs, key=lambda run: run["s"])[len(runs) // 2])
    columns = list(rows[0])
    print_table(columns, [[f"{row[column]:.6g}" for column in columns] for row in rows])
    for row in rows:
        if row["ranks"] == TARGET_RANKS:
            met = row["s"] < TARGET_S and row["peak_bytes"] < TARGET_BYTES
            print(f"target: {TARGET_S:g} s and 1 GiB in all: {'met' if met else 'missed'}")
    save("simulation", rows)


if __name__ == "__main__":
    main()
