"""Moves a module or package: the file, its tests, and its name wherever that is written.

    scripts/move.py cluster.health.facts doctor.cluster_facts    # both within rallypoint

Says what it cannot decide: imports of the module from its package, by its last name.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/rallypoint"


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def move_file(old: Path, new: Path) -> None:
    """Move it, with what packages need."""
    new.parent.mkdir(parents=True, exist_ok=True)
    git("mv", str(old), str(new))


def test_of(module: Path) -> str:
    """Where its tests are."""
    return f"{module.parent}/test_{module.name}.py"


def main() -> None:
    """Read the command line."""
    old, new = (each.replace(".", "/") for each in sys.argv[1:])
    is_package = (SOURCE / old).is_dir()
    suffix = "" if is_package else ".py"
    move_file(SOURCE / f"{old}{suffix}", SOURCE / f"{new}{suffix}")
    before, after = Path(old), Path(new)
    unit = ROOT / "tests/unit"
    tests = (before, after) if is_package else (test_of(before), test_of(after))
    if (unit / tests[0]).exists():
        move_file(unit / tests[0], unit / tests[1])
    dotted = re.compile(rf"\brallypoint\.{re.escape(old.replace('/', '.'))}(?![\w])")
    slashed = re.compile(rf"(?<=rallypoint/){re.escape(old)}{re.escape(suffix)}(?![\w])")
    nearby = re.compile(rf"(?<![\w]){before.parent.name}/{before.name}\.py")
    alone = re.compile(rf"(?<![\w/]){before.name}\.py")
    by_last_name = re.compile(
        rf"from rallypoint\.{re.escape(str(before.parent).replace('/', '.'))} import .*"
        rf"\b{before.name}\b"
    )
    for name in git("ls-files").split():
        path = ROOT / name
        if path.suffix in (".png", ".svg", ".lock") or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        moved = dotted.sub(f"rallypoint.{new.replace('/', '.')}", text)
        moved = slashed.sub(f"{new}{suffix}", moved)
        moved = moved.replace(f"tests/unit/{test_of(before)}", f"tests/unit/{test_of(after)}")
        if not is_package:
            moved = nearby.sub(f"{after.parent.name}/{after.name}.py", moved)
            if (SOURCE / after.parent) == path.parent and before.parent == after.parent:
                moved = alone.sub(f"{after.name}.py", moved)
        for match in by_last_name.finditer(moved):
            print(f"{name}: {match[0]}")
        if moved != text:
            path.write_text(moved, encoding="utf-8")


if __name__ == "__main__":
    main()
