"""`make wheel`: the wheel for this machine and old C libraries, in an environment of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from tests.pages import ROOT

pytestmark = [pytest.mark.system, pytest.mark.seldom, pytest.mark.timeout(3600)]


def test_the_wheel_for_old_systems_runs_a_job(tmp_path: Path) -> None:
    processor = platform.machine()
    if processor not in ("x86_64", "aarch64"):
        pytest.skip(f"there are no wheels for {processor}")
    environ = os.environ | {"PROCESSORS": processor}
    made = subprocess.run(
        [ROOT / "scripts" / "wheel", sys.executable], cwd=ROOT, env=environ, check=False
    )
    assert made.returncode == 0
    version = f"cp3{sys.version_info.minor}"
    tag = "cp311-cp311" if version == "cp311" else "cp312-abi3"
    wheels = (ROOT / "dist").glob(f"rallypoint-*-{tag}-manylinux_2_*_{processor}.whl")
    newest = max(wheels, key=lambda path: path.stat().st_mtime)
    subprocess.run([ROOT / "scripts" / "make_venv", sys.executable, tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", newest]
    subprocess.run(install, check=True)
    tried = subprocess.run(
        [ROOT / "scripts" / "try_package", python],
        env=environ | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tried.returncode == 0, tried.stderr
    assert " works with Python 3." in tried.stdout
