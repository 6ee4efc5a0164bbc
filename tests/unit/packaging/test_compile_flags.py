"""All native code rounds each product, so results have the same bits on every processor."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_no_product_is_fused_with_a_sum(compiler: str, tmp_path: Path) -> None:
    """Compilers for aarch64 do so otherwise, in the loops and in what the tests compare them to."""
    cmake = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake: .venv/bin/pip install --group build")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} (Debian: apt-get install g++ clang)")
    options = [f"-DCMAKE_CXX_COMPILER={compiler}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path), *options]
    subprocess.run(command, check=True, capture_output=True)
    files = {
        Path(entry["file"]).name: entry["command"].split()
        for entry in json.loads((tmp_path / "compile_commands.json").read_text())
    }
    assert {"reduce_loops.cc", "lane_runner.cc", "test_reduce.cc"} <= files.keys()
    fused = [name for name, words in files.items() if "-ffp-contract=off" not in words]
    assert fused == []
