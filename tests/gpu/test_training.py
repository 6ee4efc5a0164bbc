"""DDP and FSDP under our launcher, with NCCL and with ranks that share a GPU.

NCCL refuses two ranks on one GPU: with one GPU its world has one rank.
"""

from __future__ import annotations

from tests.gpu.conftest import Run, said, shared_ways


def train(run: Run, backend: str, ranks: int, **environ: str) -> str:
    """What else was said."""
    done = run("train.py", backend, flags=("--nproc-per-node", str(ranks)), **environ)
    well = [f"trained {rank} {way} well" for rank in range(ranks) for way in ("ddp", "fsdp")]
    assert said(done, "trained") == well
    return done.stderr


def test_training_with_nccl(run: Run, gpus: int, nccl: str) -> None:
    train(run, nccl, gpus)


def test_training_with_ours_on_a_gpu_for_each_rank(run: Run, gpus: int) -> None:
    """Its calls go to NCCL."""
    assert "copied to the host" not in train(run, "rallypoint", gpus)


@shared_ways
def test_training_of_ranks_that_share_gpus(run: Run, gpus: int, way: str) -> None:
    train(run, "rallypoint", gpus + 1, RALLYPOINT_DEVICE_MEMORY=way)
