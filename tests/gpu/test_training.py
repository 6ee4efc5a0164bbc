"""DDP and FSDP under our launcher, with NCCL and with ranks that share a GPU.

NCCL refuses two ranks on one GPU: with one GPU its world has one rank.
"""

from __future__ import annotations

import pytest
from tests.gpu.conftest import Run, said, shared_ways


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_training_with_nccl(run: Run, gpus: int, nccl: str, way: str) -> None:
    done = run("train.py", way, nccl, flags=("--nproc-per-node", str(gpus)))
    assert said(done, "trained") == [f"trained {rank} well" for rank in range(gpus)]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_training_with_ours_on_a_gpu_for_each_rank(run: Run, gpus: int, way: str) -> None:
    """Its calls go to NCCL."""
    done = run("train.py", way, "rallypoint", flags=("--nproc-per-node", str(gpus)))
    assert said(done, "trained") == [f"trained {rank} well" for rank in range(gpus)]
    assert "copied to the host" not in done.stderr


@pytest.mark.parametrize("model", ["ddp", "fsdp"])
@shared_ways
def test_training_of_ranks_that_share_gpus(run: Run, gpus: int, model: str, way: str) -> None:
    ranks = gpus + 1
    flags = ("--nproc-per-node", str(ranks))
    done = run("train.py", model, "rallypoint", flags=flags, RALLYPOINT_DEVICE_MEMORY=way)
    assert said(done, "trained") == [f"trained {rank} well" for rank in range(ranks)]
