"""How long does a worker's death take? From kill -9 of one worker to the script's first line in all
new workers, on one node and on three: rallypoint against torchrun in turn. A table, and JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import need, print_table, save

TARGET_S = 0.2
# Agents, and workers of each.
LAYOUTS = {"1 node of 4": (1, 4), "3 nodes of 1": (3, 1)}

# Each worker says when it came to its first line, then waits to be killed.
SCRIPT = """
import time
now = time.time()
import os, sys
path = f"{sys.argv[1]}/{os.environ['RANK']}"
with open(path + ".part", "w") as file:
    file.write(f"{now} {os.getpid()}")
os.rename(path + ".part", path)
time.sleep(600)
"""


def commands(name: str, nodes: int, workers: int) -> list[list[str]]:
    """One command for each agent."""
    scripts = Path(sys.executable).parent
    program = [str(scripts / "rallypoint"), "run"]
    if name == "torchrun":
        program = [str(scripts / "torchrun")]
    program += ["--nproc-per-node", str(workers), "--max-restarts", "100"]
    if nodes == 1:
        return [[*program, "--standalone"]]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(port)]
    if name == "torchrun":  # its static nodes cannot start again
        endpoint = f"127.0.0.1:{port}"
        flags = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    return [[*program, *flags, "--node-rank", str(rank)] for rank in range(nodes)]


class Job:
    """A job whose workers wait to be killed."""

    def __init__(self, name: str, nodes: int, workers: int) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._ranks = nodes * workers
        script = Path(self._directory.name) / "script.py"
        script.write_text(SCRIPT)
        self._agents = [
            subprocess.Popen(
                [*command, str(script), self._directory.name],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for command in commands(name, nodes, workers)
        ]
        self._wait(0.0)

    def recovery_s(self) -> float:
        """Kill one worker, and wait for all new ones."""
        begin = time.time()
        os.kill(random.choice(self._pids), signal.SIGKILL)
        return self._wait(begin) - begin

    def close(self) -> None:
        """End it."""
        for agent in self._agents:
            agent.terminate()
        for agent in self._agents:
            agent.wait()
        self._directory.cleanup()

    def _wait(self, since: float) -> float:
        """Until all workers have begun after `since`; when the last one did."""
        deadline = time.monotonic() + 120
        while True:
            told = [path.read_text().split() for path in self._paths() if path.exists()]
            begun = [float(now) for now, _ in told]
            if len(begun) == self._ranks and min(begun) > since:
                self._pids = [int(pid) for _, pid in told]
                return max(begun)
            if time.monotonic() > deadline:
                self.close()
                raise SystemExit("not all workers came back within 120 s")
            time.sleep(0.002)

    def _paths(self) -> list[Path]:
        return [Path(self._directory.name) / str(rank) for rank in range(self._ranks)]


def measure(rounds: int, nodes: int, workers: int) -> dict[str, list[float]]:
    names = ["rallypoint"]
    if need("torch", "only rallypoint is measured (pip install torch)"):
        names.append("torchrun")
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        # One at a time, so that neither is slowed by the other's workers.
        for name in names if turn % 2 == 0 else reversed(names):
            job = Job(name, nodes, workers)
            times[name] += [job.recovery_s() for _ in range(3)]
            job.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="jobs of 3 kills each")
    rounds = parser.parse_args().rounds
    rows = []
    for layout, (nodes, workers) in LAYOUTS.items():
        for name, values in measure(rounds, nodes, workers).items():
            median, least, most = statistics.median(values), min(values), max(values)
            row = {"layout": layout, "launcher": name, "kills": len(values), "median_s": median}
            rows.append({**row, "min_s": least, "max_s": most})
    print("kill -9 of one worker to the first line of all new ones\n")
    cells = [[str(row[key]) for key in ("layout", "launcher", "kills")] for row in rows]
    numbers = [[f"{row[key]:.3f}" for key in ("median_s", "min_s", "max_s")] for row in rows]
    table = [left + right for left, right in zip(cells, numbers, strict=True)]
    print_table(("layout", "launcher", "kills", "median s", "min", "max"), table)
    ours = max(float(str(row["median_s"])) for row in rows if row["launcher"] == "rallypoint")
    verdict = "met" if ours <= TARGET_S else "MISSED"
    print(f"\nrallypoint at most {ours:.3f} s (target: {TARGET_S:g} s): {verdict}")
    save("recovery", rows)


if __name__ == "__main__":
    main()
