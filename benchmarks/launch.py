"""What does a launch cost? Start to finish of an empty script with 2 workers, and the memory of the
launcher's own processes: rallypoint against torchrun in turn, and two bare interpreters as the
floor. A table on screen, and benchmarks/results/launch.json.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import save

WORKERS = 2
TARGET_RATIO = 0.1
TARGET_MIB = 35.0

HOLD = """
import os, sys, time
open(sys.argv[1] + "/ready." + os.environ["RANK"], "w").close()
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.01)
"""


def launchers() -> dict[str, list[str]]:
    scripts = Path(sys.executable).parent
    flags = ["--standalone", "--nproc-per-node", str(WORKERS)]
    found = {"rallypoint": [str(scripts / "rallypoint"), "run", *flags]}
    torchrun = scripts / "torchrun"
    if torchrun.exists():
        found["torchrun"] = [str(torchrun), *flags]
    return found


def wall_s(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def bare_s(script: Path) -> float:
    begin = time.perf_counter()
    running = [subprocess.Popen([sys.executable, str(script)]) for _ in range(WORKERS)]
    for process in running:
        process.wait()
    return time.perf_counter() - begin


def launcher_mib(command: list[str]) -> float:
    """Peak memory of the launcher and of what it started for itself, while the workers run."""
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "hold.py"
        script.write_text(HOLD)
        process = subprocess.Popen(
            [*command, str(script), directory],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while len(list(Path(directory).glob("ready.*"))) < WORKERS:
            if process.poll() is not None:
                raise SystemExit(f"{command[0]} ended early with {process.returncode}")
            time.sleep(0.02)
        total = sum(peak_mib(pid) for pid in family(process.pid) if not is_worker(pid))
        (Path(directory) / "go").touch()
        process.wait()
    return total


def family(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(text.rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:  # grows while we go through it
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def is_worker(pid: int) -> bool:
    return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()


def peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def measure(rounds: int) -> dict[str, dict[str, float]]:
    commands = launchers()
    with tempfile.TemporaryDirectory() as directory:
        noop = Path(directory) / "noop.py"
        noop.touch()
        walls: dict[str, list[float]] = {name: [] for name in [*commands, "bare"]}
        for command in commands.values():
            wall_s([*command, str(noop)])  # fills the file cache
        for turn in range(rounds):
            order = list(commands) if turn % 2 == 0 else list(reversed(commands))
            for name in order:
                walls[name].append(wall_s([*commands[name], str(noop)]))
            walls["bare"].append(bare_s(noop))
    results = {}
    for name, times in walls.items():
        results[name] = {
            "wall_ms": statistics.median(times) * 1e3,
            "wall_ms_min": min(times) * 1e3,
            "wall_ms_max": max(times) * 1e3,
        }
        if name in commands:
            results[name]["launcher_mib"] = launcher_mib(commands[name])
    return results


def show(results: dict[str, dict[str, float]]) -> None:
    print(f"an empty script, {WORKERS} workers, {os.cpu_count()} CPUs\n")
    print(f"{'':<22}{'wall ms':>10}{'min':>9}{'max':>9}{'launcher MiB':>15}")
    names = {"rallypoint": "rallypoint run", "torchrun": "torchrun", "bare": "2 bare interpreters"}
    for name, row in results.items():
        mib = f"{row['launcher_mib']:15.1f}" if "launcher_mib" in row else f"{'-':>15}"
        times = f"{row['wall_ms']:10.1f}{row['wall_ms_min']:9.1f}{row['wall_ms_max']:9.1f}"
        print(f"{names[name]:<22}{times}{mib}")
    ours = results["rallypoint"]
    print()
    if "torchrun" in results:
        ratio = ours["wall_ms"] / results["torchrun"]["wall_ms"]
        print(verdict(f"wall time {ratio:.3f} of torchrun's", ratio, TARGET_RATIO))
    else:
        print("torch is not installed: only rallypoint was measured (pip install torch)")
    memory = ours["launcher_mib"]
    print(verdict(f"memory {memory:.1f} MiB, guardian included", memory, TARGET_MIB))


def verdict(text: str, value: float, target: float) -> str:
    return f"{text} (target: at most {target:g}): {'met' if value <= target else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    if shutil.which(launchers()["rallypoint"][0]) is None:
        raise SystemExit("rallypoint is not installed beside this Python; run `make` first")
    results = measure(rounds)
    show(results)
    save("launch", [{"launcher": name, **row} for name, row in results.items()])


if __name__ == "__main__":
    main()
