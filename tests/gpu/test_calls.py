"""CUDA tensors through "rallypoint": right values on every stream, barriers, groups, memory."""

from __future__ import annotations

import pytest
from tests.gpu.conftest import KIND, Run, said


def ranks_of(gpus: int, *, is_shared: bool) -> int:
    """More ranks than GPUs: all is staged; as many: NCCL takes it."""
    return gpus + 1 if is_shared else gpus


@pytest.mark.exact
@pytest.mark.parametrize("is_shared", [True, False], ids=["staged", "a GPU for each rank"])
def test_every_call_on_every_stream(run: Run, gpus: int, is_shared: bool) -> None:
    ranks = ranks_of(gpus, is_shared=is_shared)
    done = run("calls.py", "rallypoint", flags=("--nproc-per-node", str(ranks)))
    assert said(done, "calls") == [f"calls {rank} right" for rank in range(ranks)]
    if KIND == "cuda":
        assert ("copied to the host and back" in done.stderr) == is_shared


@pytest.mark.parametrize("is_shared", [True, False], ids=["staged", "a GPU for each rank"])
def test_a_barrier_comes_after_the_work_of_streams(run: Run, gpus: int, is_shared: bool) -> None:
    ranks = ranks_of(gpus, is_shared=is_shared)
    lines = said(run("barrier.py", flags=("--nproc-per-node", str(ranks))), "turn")
    expected = [(turn, rank) for turn in range(ranks) for rank in range(ranks)]
    assert lines == [f"turn {turn} {rank} in order" for turn, rank in expected]


@pytest.mark.exact
def test_groups_and_tensors_of_several_kinds(run: Run, gpus: int, nccl: str) -> None:
    ranks = gpus + 1
    done = run("mixed.py", nccl, flags=("--nproc-per-node", str(ranks)))
    assert said(done, "mixed") == [f"mixed {rank} right" for rank in range(ranks)]


def test_memory_is_returned(run: Run, gpus: int) -> None:
    ranks = gpus + 1
    done = run("memory.py", flags=("--nproc-per-node", str(ranks)))
    assert said(done, "memory") == ["memory returned"] * ranks


@pytest.mark.exact
def test_our_own_calls_with_nccl(run: Run, gpus: int, nccl: str) -> None:
    done = run("our_calls.py", nccl, flags=("--nproc-per-node", str(gpus)))
    assert said(done, "called") == [f"called {rank} right" for rank in range(gpus)]
