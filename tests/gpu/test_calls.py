"""CUDA tensors through "rallypoint": right values on every stream, barriers, groups, memory."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu.conftest import (
    ENVIRON,
    IN_MEMORY,
    KIND,
    LIMIT_S,
    STAGED,
    WORKERS,
    Run,
    said,
    shared_ways,
)

WAYS = {"device memory": "1", "staged": "0", "a GPU for each rank": ""}
ways = pytest.mark.parametrize("way", list(WAYS))


def ranks_of(gpus: int, way: str) -> int:
    """As many ranks as GPUs: NCCL takes it; else they share one."""
    return gpus + (WAYS[way] != "")


@pytest.mark.exact
@ways
def test_every_call_on_every_stream(run: Run, gpus: int, way: str) -> None:
    ranks = ranks_of(gpus, way)
    flags = ("--nproc-per-node", str(ranks))
    done = run("calls.py", "rallypoint", flags=flags, RALLYPOINT_DEVICE_MEMORY=WAYS[way])
    assert said(done, "calls") == [f"calls {rank} right" for rank in range(ranks)]
    assert (IN_MEMORY in done.stderr) == (way == "device memory" and (gpus == 1 or KIND == "cpu"))
    if KIND == "cuda" and gpus == 1:
        assert (STAGED in done.stderr) == (way == "staged")


@ways
def test_a_barrier_comes_after_the_work_of_streams(run: Run, gpus: int, way: str) -> None:
    ranks = ranks_of(gpus, way)
    flags = ("--nproc-per-node", str(ranks))
    lines = said(run("barrier.py", flags=flags, RALLYPOINT_DEVICE_MEMORY=WAYS[way]), "turn")
    expected = [(turn, rank) for turn in range(ranks) for rank in range(ranks)]
    assert lines == [f"turn {turn} {rank} in order" for turn, rank in expected]


@pytest.mark.exact
@shared_ways
def test_groups_and_tensors_of_several_kinds(run: Run, gpus: int, nccl: str, way: str) -> None:
    ranks = gpus + 1
    flags = ("--nproc-per-node", str(ranks))
    done = run("mixed.py", nccl, flags=flags, RALLYPOINT_DEVICE_MEMORY=way)
    assert said(done, "mixed") == [f"mixed {rank} right" for rank in range(ranks)]


@shared_ways
def test_memory_is_returned(run: Run, gpus: int, way: str) -> None:
    ranks = gpus + 1
    done = run("memory.py", flags=("--nproc-per-node", str(ranks)), RALLYPOINT_DEVICE_MEMORY=way)
    assert said(done, "memory") == ["memory returned"] * ranks


@pytest.mark.exact
@shared_ways
def test_random_calls(run: Run, gpus: int, way: str, seed: int) -> None:
    """They have the bits of the same calls with tensors on the CPU."""
    ranks = gpus + 1
    flags = ("--nproc-per-node", str(ranks))
    environ = {"RALLYPOINT_DEVICE_MEMORY": way, "RALLYPOINT_ALGORITHM": "direct"}
    done = run("random_bits.py", str(seed), "200", flags=flags, **environ)
    assert said(done, "random") == [f"random {rank} right" for rank in range(ranks)]


@pytest.mark.exact
@shared_ways
def test_new_weights_from_another_job(gpus: int, tmp_path: Path, way: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = [sys.executable, "-m", "rallypoint", "run", "--standalone", "--nproc-per-node", "2"]
    jobs = [
        subprocess.Popen(
            [*command, str(WORKERS / "weights.py"), role, port],
            cwd=tmp_path,
            env={**ENVIRON, "RALLYPOINT_DEVICE_MEMORY": way},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for role in ("serve", "train")
    ]
    served, trained = (job.communicate(timeout=LIMIT_S)[0] for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0], served + trained
    assert served.count(": got [4.5]") == 2, served
    if gpus == 1 or KIND == "cpu":
        assert (IN_MEMORY in trained) == (way == "1"), trained


@pytest.mark.exact
def test_memory_that_cannot_be_shared(run: Run, gpus: int) -> None:
    if KIND == "cpu":
        pytest.skip("this is about PyTorch's allocator of GPU memory")
    ranks = gpus + 1
    flags, settings = ("--nproc-per-node", str(ranks)), "expandable_segments:True"
    environ = {"RALLYPOINT_DEVICE_MEMORY": "1", "PYTORCH_CUDA_ALLOC_CONF": settings}
    done = run("calls.py", "rallypoint", flags=flags, **environ)
    assert said(done, "calls") == [f"calls {rank} right" for rank in range(ranks)]
    assert STAGED in done.stderr


@pytest.mark.exact
def test_our_own_calls_with_nccl(run: Run, gpus: int, nccl: str) -> None:
    done = run("our_calls.py", nccl, flags=("--nproc-per-node", str(gpus)))
    assert said(done, "called") == [f"called {rank} right" for rank in range(gpus)]
