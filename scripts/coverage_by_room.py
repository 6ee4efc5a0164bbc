"""Adds up what coverage and llvm-cov found by room, and fails if one is below its least.

    coverage_by_room.py PYTHON.json NATIVE.json

A room is a folder of src/rallypoint or native. Lines are counted, not branches.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePath

LEAST = 85.0  # per cent, of each room

Lines = tuple[PurePath, int, int]  # file; lines that ran; lines that there are


def python_lines(path: Path) -> Iterator[Lines]:
    """By file, as `coverage json` writes it."""
    for name, found in json.loads(path.read_text())["files"].items():
        parts = PurePath(name).parts
        begin = len(parts) - parts[::-1].index("rallypoint")  # below what is installed
        summary = found["summary"]
        file = PurePath("src/rallypoint", *parts[begin:])
        yield file, summary["covered_lines"], summary["num_statements"]


def native_lines(path: Path) -> Iterator[Lines]:
    """By file of ours, as `llvm-cov export` writes it."""
    root = Path.cwd()
    for found in json.loads(path.read_text())["data"][0]["files"]:
        file = Path(found["filename"]).resolve()
        if file.is_relative_to(root / "native"):
            lines = found["summary"]["lines"]
            yield file.relative_to(root), lines["covered"], lines["count"]


def main() -> int:
    """Print the table; the exit status."""
    rooms: defaultdict[PurePath, list[int]] = defaultdict(lambda: [0, 0])
    paths = [Path(word) for word in sys.argv[1:]]
    for file, ran, there in (*python_lines(paths[0]), *native_lines(paths[1])):
        rooms[file.parent][0] += ran
        rooms[file.parent][1] += there
    print("coverage by room: lines that ran, of those that there are")
    low = []
    for room, (ran, there) in sorted(rooms.items()):
        share = 100 * ran / there if there else 100.0
        low += [str(room)] if share < LEAST else []
        print(f"{share:6.1f} %  {ran:5}/{there:<5}  {room}")
    if low:
        print(f"coverage: below {LEAST:.0f} %: {', '.join(low)}", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
