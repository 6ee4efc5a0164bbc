"""What agents on Ray reserve, and how many workers they start."""

from __future__ import annotations

import pytest

from rallypoint.cli.options import UsageError
from rallypoint.cli.ray.need import Need, read_need

CPUS = {"CPU": 8.0, "memory": 1e9}
GPUS = {"CPU": 32.0, "GPU": 4.0}


def need(*words: str, nodes: tuple[dict[str, float], ...] = (CPUS,)) -> Need:
    values = dict(word.split("=") for word in words)
    return read_need(values, nodes)


def test_workers_by_number() -> None:
    assert need() == Need(1, 1, 0)
    assert need("--nproc-per-node=4") == Need(4, 4, 0)
    assert need("--nproc-per-node=4", nodes=(CPUS, GPUS)) == Need(4, 4, 4)
    assert need("--nproc-per-node=4", "--gpus-per-node=0", nodes=(GPUS,)) == Need(4, 4, 0)
    assert need("--nproc-per-node=4", "--cpus-per-node=32", nodes=(GPUS,)) == Need(4, 32, 4)


def test_workers_by_what_the_smallest_node_has() -> None:
    larger = {"CPU": 64.0, "GPU": 8.0}
    assert need("--nproc-per-node=gpu", nodes=(CPUS, larger, GPUS)) == Need(4, 4, 4)
    assert need("--nproc-per-node=auto", nodes=(CPUS, larger, GPUS)) == Need(4, 4, 4)
    assert need("--nproc-per-node=auto", nodes=(CPUS, {"CPU": 16.0})) == Need(8, 8, 0)
    assert need("--nproc-per-node=cpu", nodes=(GPUS, {"memory": 1.0})) == Need(32, 32, 0)
    assert need("--nproc-per-node=gpu", "--gpus-per-node=2", nodes=()) == Need(2, 2, 2)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("--nproc-per-node=gpu", "no node of this Ray cluster has GPUs now"),
        ("--nproc-per-node=0", "it must be 1 or more"),
        ("--nproc-per-node=some", "--nproc-per-node"),
    ],
)
def test_what_makes_no_sense(word: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        need(word)


def test_nodes_that_have_no_cpus_now() -> None:
    with pytest.raises(UsageError, match="no node of this Ray cluster has CPUs now; say how many"):
        need("--nproc-per-node=cpu", nodes=())


def test_what_fits() -> None:
    assert Need(4, 4, 4).fits(GPUS)
    assert not Need(4, 4, 4).fits(CPUS)
    assert Need(4, 0, 0).fits({})
    assert str(Need(1, 1, 2)) == "1 CPU and 2 GPUs"
