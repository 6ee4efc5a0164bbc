"""Ranks and jobs that end while kernels run: who is told, and what is left on the device."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.conftest import ENVIRON, KIND, LIMIT_S, WORKERS, Run, shared_ways

_FREE = "import torch; torch.cuda.init(); print(torch.cuda.mem_get_info()[0])"
_SPARE_BYTES = 256 << 20  # other programs come and go


@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("is_worker", [True, False], ids=["rank 0", "the last rank"])
@shared_ways
def test_a_rank_that_is_lost_while_kernels_run(
    run: Run, gpus: int, how: str, is_worker: bool, way: str
) -> None:
    """Rank 0 is the one that works for all in device memory."""
    ranks = gpus + 1
    victim = 0 if is_worker else ranks - 1
    flags = ("--nproc-per-node", str(ranks))
    done = run("lost.py", how, str(victim), flags=flags, RALLYPOINT_DEVICE_MEMORY=way)
    assert done.returncode == 1, done.stdout + done.stderr
    culprit = "killed by SIGKILL" if how == "kill" else "rank gave up with kernels in the queue"
    assert culprit in done.stderr
    told = sorted(line for line in done.stdout.splitlines() if line.startswith("told"))
    assert told == [f"told {rank} soon" for rank in range(ranks) if rank != victim]


def free_bytes() -> int:
    """Of the first GPU, as a process of its own sees it."""
    if KIND == "cpu":
        return 0
    told = subprocess.run([sys.executable, "-c", _FREE], capture_output=True, text=True, check=True)
    return int(told.stdout)


def test_a_job_that_is_ended_gives_its_memory_back(gpus: int, tmp_path: Path) -> None:
    before = free_bytes()
    command = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", str(gpus + 1)]
    with (tmp_path / "said").open("wb") as said:
        job: Any = subprocess.Popen(
            [*command, "--shutdown-timeout", "5", str(WORKERS / "lost.py"), "stay", "0"],
            cwd=tmp_path,
            env=ENVIRON,
            stdout=said,
            stderr=said,
        )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not all((tmp_path / f"up.{rank}").exists() for rank in range(gpus + 1)):
            assert job.poll() is None, (tmp_path / "said").read_text()
            assert time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == 128 + signal.SIGTERM
    finally:
        job.kill()
        job.wait()
    deadline = time.monotonic() + 60
    while free_bytes() < before - _SPARE_BYTES:
        assert time.monotonic() < deadline, "memory of the GPU is still taken"
        time.sleep(0.5)
