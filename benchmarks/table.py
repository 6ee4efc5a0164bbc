"""What the benchmarks share: rows on screen, and the same rows as JSON in benchmarks/results/.

docs/measurements.md describes how such a file becomes a figure of a page.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_LOAD = round(os.getloadavg()[0], 1)  # before the benchmark adds its own


def human_bytes(nbytes: int) -> str:
    """8 -> "8 B", 262144 -> "256 KiB"."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print right-aligned columns."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def save(name: str, rows: list[dict[str, Any]]) -> None:
    """Write the rows as a record: with the date, the command, the machine and the versions."""
    RESULTS.mkdir(exist_ok=True)
    program = f"benchmarks/{Path(sys.argv[0]).name}"
    record = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": shlex.join(["python", program, *sys.argv[1:]]).replace(str(Path.home()), "~"),
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "load": _LOAD,
        },
        "versions": {"python": platform.python_version(), **_versions()},
        "rows": rows,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def need(module: str, why: str) -> bool:
    """Whether a module is there; if not, say what goes unmeasured."""
    try:
        __import__(module)
    except ImportError:
        print(f"{module} is not installed: {why}", file=sys.stderr)
        return False
    return True


def _versions() -> dict[str, str]:
    found = {}
    for package in ("rallypoint", "numpy", "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
