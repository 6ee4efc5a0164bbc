"""What a launch must not pay for: modules that cost milliseconds and that no healthy job needs.

Names, not times: benchmarks/launch.py measures.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.exact]

EXPENSIVE = {
    *("argparse", "ast", "asyncio", "contextlib", "dataclasses", "datetime", "inspect", "json"),
    *("importlib.metadata", "logging", "multiprocessing", "numpy", "pathlib", "re", "shutil"),
    *("ssl", "subprocess", "tempfile", "threading", "torch", "traceback", "typing", "uuid"),
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--standalone", "--nproc-per-node", "2"], marks=pytest.mark.everyday),
        ["--nproc-per-node=auto", "--max-restarts=3", "--shutdown-timeout", "5", "-m"],
        ["--log-dir", "{directory}/logs", "-r", "3", "-t", "0:3", "--log-prefix", "{{rank}}: "],
    ],
    ids=["standalone", "module", "logs"],
)
def test_a_launch_imports_nothing_expensive(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "noop.py").touch()
    words = [flag.format(directory=tmp_path) for flag in flags]
    script = "noop" if "-m" in flags else "noop.py"
    runs = (imported_by([*words, script], tmp_path) for _ in range(100))
    # Programs that tests beside this one start, as `ps`, may find the job and ask it.
    imported = next(each for each in runs if "rallypoint.launch.agent.answers" not in each)
    assert "rallypoint.launch.agent.loop" in imported
    assert not imported & EXPENSIVE


def imported_by(words: list[str], directory: Path) -> set[str]:
    """What `rallypoint run` imports with these words."""
    launcher = Path(sys.executable).parent / "rallypoint"
    result = subprocess.run(
        [sys.executable, "-X", "importtime", str(launcher), "run", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
    )
    assert result.returncode == 0, result.stderr
    return {
        line.rpartition("|")[2].strip()
        for line in result.stderr.splitlines()
        if line.startswith("import time:")
    }
