"""scripts/try_package, which tries each wheel before it is published."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

SCRIPT = Path(__file__).parents[2] / "scripts" / "try_package"


def test_the_installed_package_passes() -> None:
    python = Path(sys.executable)
    relative = python.relative_to(python.parents[1])  # as bin/python
    command: list[str | Path] = [SCRIPT, relative]
    tried = subprocess.run(
        command, cwd=python.parents[1], capture_output=True, text=True, check=False
    )
    assert tried.returncode == 0, tried.stderr
    assert " works with Python 3." in tried.stdout


def test_a_guardian_that_cannot_be_executed_fails(tmp_path: Path) -> None:
    """As a wheel has it from a tool that loses permissions."""
    import rallypoint

    copy = tmp_path / "rallypoint"
    shutil.copytree(Path(rallypoint.__file__).parent, copy, symlinks=True)
    (copy / "launch" / "agent" / "guardian").chmod(0o644)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    tried = subprocess.run([SCRIPT, python], capture_output=True, text=True, check=False)
    assert tried.returncode != 0
    assert "guardian cannot be executed" in tried.stderr
