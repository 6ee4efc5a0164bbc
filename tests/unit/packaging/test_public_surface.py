"""What users depend on changes only on purpose: with tests/public_surface.txt, and CHANGELOG.md."""

from __future__ import annotations

import difflib
import subprocess
import sys

from tests.pages import ROOT


def test_the_public_surface_is_as_before() -> None:
    before = (ROOT / "tests/public_surface.txt").read_text(encoding="utf-8").splitlines()
    program = ROOT / "scripts/public_surface.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    changed = [
        line
        for line in difflib.unified_diff(before, done.stdout.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    assert not changed, "\n".join(
        ["", *changed, "if it is meant: scripts/public_surface.py > tests/public_surface.txt"]
    )
