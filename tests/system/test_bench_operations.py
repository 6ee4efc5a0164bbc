"""`rallypoint bench OPERATION`: every operation, and a peer that is wrong.

The MPI here is a stand-in, so that it can be wrong when it is to be: it adds nothing up, and fails
with 3,000 items and more. The real ones take part in test_bench_hosts.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.system

OTHERS = (
    *("reduce", "broadcast", "all_gather", "gather", "scatter"),
    *("reduce_scatter", "all_to_all", "barrier", "send"),
)
STAND_IN = """
import os
SUM, IN_PLACE = "sum", None
PROD = MIN = MAX = SUM
class Comm:
    Get_rank = lambda self: int(os.environ["PMI_RANK"])
    Get_size = lambda self: 2
    Barrier = Reduce = Bcast = Allgather = Reduce_scatter_block = lambda *_: None
    Alltoall = Gather = Scatter = Send = Recv = Barrier
    def Allreduce(self, _, array, op):
        if len(array) >= 3000:
            raise MemoryError("too long")
COMM_WORLD = Comm()
Get_library_version = lambda: "Stand-in 1.2.3"
Finalize = lambda: None
"""
UCX = """
import torch.distributed as dist

def register():
    make = lambda *arguments: dist.ProcessGroupGloo(*arguments)
    dist.Backend.register_backend("ucx", make, devices=["cpu"])
"""


def bench(*words: str, directory: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint", "bench", *words],
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env={**os.environ, "XDG_CACHE_HOME": str(directory)},
    )
    assert done.returncode == 0, done.stderr
    return done


def rows_of(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if re.match(r" +\d", line)]


def expect_right(operation: str, directory: Path) -> None:
    """The figures of three ranks, which check their results."""
    words = ("--nproc-per-node", "3", "--sizes", "24,1200", "--dtype", "int16", "--rounds", "1")
    result = bench(operation, *words, "--op", "max", "--json", "found.json", directory=directory)
    rows = rows_of(result.stdout)
    assert [row[0] for row in rows] == (["0"] if operation == "barrier" else ["24", "1200"])
    parts = 3 if "_to_" in operation or "gather" in operation or "scatter" in operation else 1
    for row in rows:
        assert int(row[0]) == int(row[1]) * 2 * parts
        assert row[7] == "0", row
        assert float(row[4]) > 0
    for found in json.loads((directory / "found.json").read_text())["rows"]:
        ours = found["results"]["rallypoint"]
        assert ours["wrong"] == 0
        assert ours["time_us"] == np.median(ours["times_us"])


@pytest.mark.everyday
def test_every_operation_is_right(tmp_path: Path) -> None:
    """This one; below the others."""
    expect_right("all_reduce", tmp_path)


def test_every_other_operation_is_right(tmp_path: Path) -> None:
    for operation in OTHERS:
        expect_right(operation, tmp_path)


def stand_in(directory: Path) -> Path:
    """A directory that looks like a virtual environment with an MPI."""
    prefix = directory / "mpi"
    package = prefix / "lib" / "mpi4py"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(STAND_IN)
    (prefix / "bin").mkdir()
    python = f'#!/bin/sh\nPYTHONPATH={prefix}/lib exec {sys.executable} "$@"\n'
    start = '#!/bin/sh\nshift 2\nPMI_RANK=0 "$@" & PMI_RANK=1 "$@"; wait\n'
    for name, text in (("python", python), ("mpiexec", start)):
        (prefix / "bin" / name).write_text(text)
        (prefix / "bin" / name).chmod(0o755)
    return prefix


def test_a_peer_that_is_wrong_and_fails(tmp_path: Path) -> None:
    prefix = stand_in(tmp_path)
    words = ("all_reduce", "--sizes", "400,12000,16", "--vs", "mpich", "--rounds", "2")
    result = bench(*words, "--iterations", "3", "--mpi-env", f"mpich={prefix}", directory=tmp_path)
    assert "mpich (1.2.3)" in result.stdout
    first, second, third = rows_of(result.stdout)
    assert first[8].endswith("!")
    assert [second[7:], third[7:]] == [["0", "-", "-"], ["0", "-", "-"]]
    inputs = [np.random.default_rng(20_000 + rank).integers(0, 100, 100) for rank in (0, 1)]
    wrong = int(np.count_nonzero(inputs[0]) + np.count_nonzero(inputs[1]))
    (told,) = re.findall(r"! mpich: (\d+) wrong items at 400 bytes", result.stdout)
    assert abs(int(told) - wrong) <= 10  # other random numbers, as many zeros
    assert "left out from now on: mpich: MemoryError: too long" in result.stderr


@pytest.mark.needs_torch
def test_ucx_runs_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Here a stand-in over gloo; what it does not have is left out."""
    prefix = tmp_path / "ucx"
    (prefix / "bin").mkdir(parents=True)
    facts = prefix / "lib" / "commux-0.9.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text("Metadata-Version: 2.1\nName: commux\nVersion: 0.9\n")
    (prefix / "lib" / "commux.py").write_text(UCX)
    python = prefix / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={prefix}/lib exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    peer = ("--vs", "ucx", "--mpi-env", f"ucx={prefix}", "--rounds", "1", "--sizes", "16,32")
    result = bench("all_reduce", *peer, directory=tmp_path)
    assert "ucx (commux 0.9)" in result.stdout
    assert [row[7] for row in rows_of(result.stdout)] == ["0", "0"]
    assert all(float(row[8]) > 0 for row in rows_of(result.stdout))
