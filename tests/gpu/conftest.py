"""Tests on a GPU: `make test-gpu`. They need one, and skip without; several are used if there are.

They have run on one GPU, not on several. Their bodies are the scripts in workers/, which take the
kind of device from GPU_TEST_DEVICE. RALLYPOINT_TEST_DEVICE=cpu runs them without a GPU, with gloo
in NCCL's place and tests/stand_in.py in that of a GPU's memory, which shows that they are right but
little about GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KIND = os.environ.get("RALLYPOINT_TEST_DEVICE", "cuda")
WORKERS = Path(__file__).parent / "workers"
ENVIRON = {
    **os.environ,
    "GPU_TEST_DEVICE": KIND,
    # For workers.on_device.
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
}
LIMIT_S = 240
NO_GPU = "no GPU here: make test-gpu needs one, and PyTorch with CUDA or ROCm"
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
MARKS = [pytest.mark.system, pytest.mark.alone, pytest.mark.needs_torch]

# Values of RALLYPOINT_DEVICE_MEMORY, for ranks that share a GPU. On the CPU, the first one has the
# stand-in of tests/stand_in.py take its place.
shared_ways = pytest.mark.parametrize("way", ["1", "0"], ids=["device memory", "staged"])
IN_MEMORY, STAGED = "are made in its memory", "copied to the host and back"

Run = Callable[..., subprocess.CompletedProcess[str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for mark in MARKS:
                item.add_marker(mark)


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs there are; with the CPU in their place, two."""
    if KIND == "cpu":
        return 2
    if not any(map(os.path.exists, _DRIVERS)):  # PyTorch takes long to say so
        pytest.skip(NO_GPU)
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return int(torch.cuda.device_count())


@pytest.fixture
def nccl(gpus: int) -> str:
    """The backend that takes a GPU for each rank; gloo on the CPU."""
    del gpus
    return "gloo" if KIND == "cpu" else "nccl"


@pytest.fixture
def run(gpus: int, tmp_path: Path) -> Run:
    """Runs a worker script under the launcher; what it printed, and its status."""
    del gpus

    def run(script: str, *words: str, flags: tuple[str, ...] = (), **environ: str) -> Any:
        command = [sys.executable, "-m", "rallypoint", "run", *flags, str(WORKERS / script)]
        return subprocess.run(
            [*command, *words],
            cwd=tmp_path,
            env={**ENVIRON, **environ},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    return run


def said(done: subprocess.CompletedProcess[str], words: str) -> list[str]:
    """The lines that begin so, sorted; the job succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith(words))
