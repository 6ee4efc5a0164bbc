"""What do nodes cost that come, go and die? Agents on test hosts, each with a network of its own:
from the event to the script's first line in all workers of the new round; rallypoint against
torchrun in turn, both with their default settings. A table, and JSON.

    cold start   3 agents are started at once
    node lost    kill -9 of all processes of one of 3 nodes, not the endpoint's
    node joins   a third agent is started while 2 run; its own start included
    host lost    kill -9 of the node at the endpoint
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from table import need, print_table, save

from hosts import Hosts, why_not

# What one of these must stay below, in seconds; None: it is only told.
TARGETS_S = {"cold start": None, "node lost": 1.0, "node joins": 0.7, "host lost": 3.0}
# Agents that share their store with the workers, torchrun's default, often read what was meant for
# the round before, and wait 60 s for the rest; it is measured without.
MORE = {"rallypoint": {}, "torchrun": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}}
PATIENCE_S = {"rallypoint": 60.0, "torchrun": 120.0}

# Each worker says of which round of how many it is, and when it came to its first line.
SCRIPT = """
import time
now = time.time()
import os, sys
e = os.environ
name = f"{e['WORLD_SIZE']}.{e['RANK']}"
with open(f"{sys.argv[1]}/{name}.part", "w") as file:
    file.write(f"{now} {e['MASTER_PORT']}")
os.rename(f"{sys.argv[1]}/{name}.part", f"{sys.argv[1]}/{name}")
time.sleep(600)
"""


class Job:
    """A job of one worker on each host, which waits for what happens to it."""

    def __init__(self, launcher: str, nnodes: str, hosts: Hosts) -> None:
        self._launcher = launcher
        self._hosts = hosts
        self._scratch = tempfile.TemporaryDirectory()
        self._directory = Path(self._scratch.name)
        (self._directory / "script.py").write_text(SCRIPT)
        scripts = Path(sys.executable).parent
        program = [str(scripts / "torchrun")]
        if launcher == "rallypoint":
            program = [str(scripts / "rallypoint"), "run"]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400", "--rdzv-id", "j"]
        self._command = [*program, "--nnodes", nnodes, "--max-restarts", "100", *rendezvous]
        self._agents: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, numbers: Iterable[int]) -> None:
        """An agent on each of these hosts."""
        for number in numbers:
            with (self._directory / f"output.{number}").open("wb") as out:
                self._agents[number] = self._hosts[number].popen(
                    [*self._command, str(self._directory / "script.py"), str(self._directory)],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    cwd=self._directory,
                    env={**os.environ, "TMPDIR": str(self._directory), **MORE[self._launcher]},
                )

    def kill(self, number: int) -> None:
        """All processes of the job on a host, with -9."""
        for pid in reversed(self._processes(number)):  # those at the bottom first
            with contextlib.suppress(ProcessLookupError):  # by the death of one before it
                os.kill(pid, signal.SIGKILL)
        self._agents.pop(number).wait()

    def took_s(self, since: float, size: int) -> float | None:
        """Until the last of `size` workers of one round has begun after `since`; None: never."""
        deadline = time.time() + PATIENCE_S[self._launcher]
        while time.time() < deadline:
            told = [path.read_text() for path in self._directory.glob(f"{size}.*[0-9]")]
            begun = [float(text.split()[0]) for text in told]
            if len(begun) == size and min(begun) > since:
                return max(begun) - since
            if not any(agent.poll() is None for agent in self._agents.values()):
                return None
            time.sleep(0.005)
        return None

    def story(self) -> str:
        """What the agents wrote."""
        outputs = sorted(self._directory.glob("output.*"))
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in outputs)

    def close(self) -> None:
        """End it without a word: no launcher's way to stop is part of the question."""
        for number in list(self._agents):
            self.kill(number)
        self._scratch.cleanup()

    def _processes(self, number: int) -> list[int]:
        """Those of a host, without the first one, which is the host itself."""
        found = [self._hosts[number].pid]
        for pid in found:
            try:
                text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            except OSError:
                continue
            found += map(int, text.split())
        inside = _children(self._agents[number].pid)  # of nsenter, which stays outside
        for pid in inside:
            inside += _children(pid)
        return [*inside, *found[1:]]


def _children(pid: int) -> list[int]:
    try:
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    except OSError:
        return []


def measure(launcher: str, hosts: Hosts) -> dict[str, float | None]:
    """Each case once."""
    times: dict[str, float | None] = {}
    job = Job(launcher, "2:3", hosts)
    begin = time.time()
    job.start((1, 2, 3))
    times["cold start"] = job.took_s(begin, 3)
    if times["cold start"] is None:
        raise SystemExit(f"{launcher} does not start here: {job.story()}")
    time.sleep(2)  # all is quiet
    begin = time.time()
    job.kill(2)
    times["node lost"] = job.took_s(begin, 2)
    job.close()

    job = Job(launcher, "2:3", hosts)
    job.start((1, 2))
    job.took_s(0.0, 2)
    time.sleep(2)
    begin = time.time()
    job.start((3,))
    times["node joins"] = job.took_s(begin, 3)
    time.sleep(2)
    begin = time.time()
    job.kill(1)
    times["host lost"] = job.took_s(begin, 2)
    story = job.story()
    job.close()
    print(launcher, times, file=sys.stderr)
    if launcher == "torchrun" and times["node joins"] is None:
        print(story, file=sys.stderr)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=tuple(PATIENCE_S), help="measure one launcher")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the hosts end with us
    reason = why_not()
    if reason:
        raise SystemExit(f"elastic.py needs test hosts: {reason}")
    launchers = [options.only] if options.only else ["rallypoint", "torchrun"]
    if "torchrun" in launchers and not need("torch", "torchrun is not measured"):
        launchers.remove("torchrun")
    results: dict[str, list[dict[str, float | None]]] = {name: [] for name in launchers}
    for turn in range(options.rounds):
        for launcher in launchers if turn % 2 == 0 else reversed(launchers):
            with Hosts(3) as hosts:
                results[launcher].append(measure(launcher, hosts))
    rows = []
    for case in TARGETS_S:
        for launcher in launchers:
            times = [each[case] for each in results[launcher]]
            values = [value for value in times if value is not None]
            row = {"case": case, "launcher": launcher, "times": len(times)}
            row["lost"] = len(times) - len(values)
            for name, of in (("median_s", statistics.median), ("min_s", min), ("max_s", max)):
                row[name] = of(values) if values else None
            rows.append(row)
    show(rows)
    save("elastic", rows)


def show(rows: list[dict[str, object]]) -> None:
    columns = ("case", "launcher", "times", "lost", "median_s", "min_s", "max_s")
    cells = []
    for row in rows:
        values = [row[name] for name in columns]
        shown = [f"{each:.3f}" if isinstance(each, float) else str(each) for each in values]
        cells.append(["-" if each == "None" else each for each in shown])
    print("from the event to the script's first line in all workers; lost: the job did not go on\n")
    print_table([name.replace("_", " ") for name in columns], cells)
    for row in rows:
        target, median = TARGETS_S[str(row["case"])], row["median_s"]
        if row["launcher"] == "rallypoint" and target is not None:
            is_met = isinstance(median, float) and median <= target
            print(f"{row['case']}: at most {target:g} s {'met' if is_met else 'MISSED'}")


if __name__ == "__main__":
    main()
