"""The launcher on a machine with GPUs: how many workers, and which device each of them sees."""

from __future__ import annotations

import pytest
from tests.gpu.conftest import KIND, Run, said


def test_a_worker_for_each_gpu(run: Run, gpus: int) -> None:
    per_node = "gpu" if KIND == "cuda" else str(gpus)
    lines = said(run("devices.py", flags=("--nproc-per-node", per_node)), "rank ")
    assert len(lines) == gpus
    for rank, line in enumerate(lines):
        assert line.split()[1:3] == [str(rank)] * 2
        if KIND == "cuda":
            assert line.split()[4:] == [str(gpus), "3.0"]


@pytest.mark.parametrize("workers", [1, 2])
def test_each_worker_sees_the_device_of_its_local_rank_alone(
    run: Run, gpus: int, workers: int
) -> None:
    if workers > gpus:
        pytest.skip("no GPU here for a second worker")
    flags = ("--nproc-per-node", str(workers), "--virtual-local-rank")
    visible = ",".join(map(str, range(gpus)))
    lines = said(run("devices.py", flags=flags, CUDA_VISIBLE_DEVICES=visible), "rank ")
    seen = "1" if KIND == "cuda" else "0"
    assert lines == [f"rank {rank} 0 {rank} {seen} 3.0" for rank in range(workers)]
