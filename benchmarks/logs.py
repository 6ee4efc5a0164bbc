"""What do logs cost? 8 workers write 12.6 MB each as fast as they can, teed to files and to a
reader that is always there: rallypoint against torchrun in turn, and the workers alone, with their
output in files, as the floor. Rows: the time until the workers are done, until the launcher is, and
whether all lines came. A table on screen, and benchmarks/results/logs.json.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import need, print_table, save

WORKERS = 8
LINES, LINE_BYTES = 125_000, 100

WORKER = f"""
import os, sys, time
rank = os.environ.get("RANK", "0")
line = (rank + " {{:08d}} ").ljust({LINE_BYTES - 3}, "x") + "\\n"
for first in range(0, {LINES}, 1000):
    sys.stdout.write("".join(map(line.format, range(first, first + 1000))))
sys.stdout.flush()
print(time.time(), file=open(sys.argv[1] + "/done." + rank, "w"))
"""


def launch(command: list[str]) -> tuple[float, float, int]:
    """Seconds until the workers were done, until the launcher was, and lines on the terminal."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "worker.py"
        script.write_text(WORKER)
        words = [*command, "--nproc-per-node", str(WORKERS), "--log-dir", f"{directory}/logs"]
        begin = time.time()
        reader = subprocess.Popen(
            [*words, "--tee", "1", str(script), directory],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert reader.stdout is not None
        lines = 0
        while block := reader.stdout.read(1 << 20):
            lines += block.count(b"\n")
        if reader.wait() != 0:
            raise SystemExit(f"{command[0]} failed with {reader.returncode}")
        ended = time.time() - begin
        times = [float(path.read_text()) for path in Path(directory).glob("done.*")]
        logs = [path.read_bytes().count(b"\n") for path in Path(directory).rglob("stdout.log")]
        if logs != [LINES] * WORKERS:
            raise SystemExit(f"{command[0]}: files of {logs} lines instead of {LINES}")
        return max(times) - begin, ended, lines


def bare() -> float:
    """Seconds of the workers alone."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "worker.py"
        script.write_text(WORKER)
        begin = time.time()
        running = []
        for rank in range(WORKERS):
            with (Path(directory) / f"out.{rank}").open("wb") as out:
                words = [sys.executable, "-u", str(script), directory]
                running.append(subprocess.Popen(words, stdout=out, env={"RANK": str(rank)}))
        for process in running:
            process.wait()
        return time.time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    scripts = Path(sys.executable).parent
    commands = {"rallypoint": [str(scripts / "rallypoint"), "run"]}
    if need("torch", "torchrun"):
        commands["torchrun"] = [str(scripts / "torchrun")]
    results: dict[str, list[tuple[float, float, int]]] = {name: [] for name in commands}
    floor = []
    for repeat in range(repeats):
        floor.append(bare())
        for name in sorted(commands, reverse=bool(repeat % 2)):
            results[name].append(launch(commands[name]))
    megabytes = WORKERS * LINES * LINE_BYTES / 1e6
    rows = [{"launcher": "files only", "workers_s": statistics.median(floor)}]
    table = [["files only", f"{statistics.median(floor):.2f}", "", "", ""]]
    for name, runs in results.items():
        workers_s, ended_s, lines = (
            statistics.median(column) for column in zip(*runs, strict=True)
        )
        lost = WORKERS * LINES - lines
        rate = megabytes / ended_s
        rows.append(
            {
                "launcher": name,
                "workers_s": workers_s,
                "ended_s": ended_s,
                "lost_lines": lost,
                "mb_per_s": rate,
            }
        )
        table.append([name, f"{workers_s:.2f}", f"{ended_s:.2f}", f"{rate:.0f}", f"{lost:.0f}"])
    print(f"{WORKERS} workers, {megabytes:.0f} MB in all, medians of {repeats}")
    print_table(["", "workers done s", "launcher done s", "MB/s", "lines lost"], table)
    save("logs", rows)


if __name__ == "__main__":
    main()
