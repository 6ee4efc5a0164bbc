"""`rallypoint bench OPERATION`: every operation, peers, what goes wrong with them, and the end.

The MPI here is a stand-in, so that it can be wrong when it is to be: it adds nothing up, and fails
with 3,000 items and more. The real ones take part where somebody installed them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import SOON_S
from tests.system.conftest import Launch

from rallypoint.cli.benchmark.environments import default_cache

pytestmark = pytest.mark.system

OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather"),
    *("scatter", "reduce_scatter", "all_to_all", "barrier", "send"),
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
UCX_HAS = ("all_reduce", "reduce", "broadcast", "barrier", "send")


def bench(*words: str, directory: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rallypoint", "bench", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=directory,
        env={**os.environ, "XDG_CACHE_HOME": str(directory), **environ},
    )


def rows_of(table: str) -> list[list[str]]:
    return [line.split() for line in table.splitlines() if re.match(r" +\d", line)]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_is_right(tmp_path: Path, operation: str) -> None:
    words = ("--nproc-per-node", "3", "--sizes", "24,1200", "--dtype", "int16", "--rounds", "1")
    result = bench(operation, *words, "--op", "max", directory=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = rows_of(result.stdout)
    assert [row[0] for row in rows] == (["0"] if operation == "barrier" else ["24", "1200"])
    parts = 3 if "_to_" in operation or "gather" in operation or "scatter" in operation else 1
    for row in rows:
        assert int(row[0]) == int(row[1]) * 2 * parts
        assert row[7] == "0", row
        assert float(row[4]) > 0


@pytest.mark.needs_torch
def test_gloo_takes_part(tmp_path: Path) -> None:
    words = ("all_reduce", "--sizes", "8:32", "--vs", "gloo", "--rounds", "3", "--pin")
    files = ("--json", "found.json", "--plot", "found.html")
    result = bench(*words, *files, directory=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["bytes"] for row in found["rows"]] == [8, 16, 32]
    for row, shown in zip(found["rows"], rows_of(result.stdout), strict=True):
        ours, gloo = row["results"]["rallypoint"], row["results"]["gloo"]
        assert (ours["wrong"], gloo["wrong"]) == (0, 0)
        for each in (ours, gloo):
            assert each["time_us"] == np.median(each["times_us"])
            assert each["busbw_gb_s"] == pytest.approx(row["bytes"] / each["time_us"] / 1e3)
        assert float(shown[-1]) == pytest.approx(gloo["time_us"] / ours["time_us"], abs=0.006)
    assert "<svg" in (tmp_path / "found.html").read_text()


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
    assert result.returncode == 0, result.stderr
    assert "ucx (commux 0.9)" in result.stdout
    assert [row[7] for row in rows_of(result.stdout)] == ["0", "0"]
    assert all(float(row[8]) > 0 for row in rows_of(result.stdout))


@pytest.mark.needs_torch
@pytest.mark.parametrize("operation", OPERATIONS)
def test_ucx_takes_part(tmp_path: Path, operation: str) -> None:
    if not (default_cache() / "ucx" / "made").exists():
        pytest.skip("ucx is not installed: rallypoint bench all_reduce --vs ucx --get-mpi")
    cache = str(default_cache().parents[1])
    words = ("--vs", "ucx", "--rounds", "1", "--sizes", "16,64K")
    result = bench(operation, *words, directory=tmp_path, XDG_CACHE_HOME=cache)
    assert result.returncode == 0, result.stderr
    lacks = "left out from now on: ucx: RuntimeError: Backend ucx does not support"
    assert (lacks in result.stderr) == (operation not in UCX_HAS)
    for row in rows_of(result.stdout):
        assert ("!" in row[8], row[8] == "-") == (False, operation not in UCX_HAS)


def test_a_peer_that_is_wrong_and_fails(tmp_path: Path) -> None:
    prefix = stand_in(tmp_path)
    words = ("all_reduce", "--sizes", "400,12000,16", "--vs", "mpich", "--rounds", "2")
    result = bench(*words, "--iterations", "3", "--mpi-env", f"mpich={prefix}", directory=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "mpich (1.2.3)" in result.stdout
    first, second, third = rows_of(result.stdout)
    assert first[8].endswith("!")
    assert [second[7:], third[7:]] == [["0", "-", "-"], ["0", "-", "-"]]
    inputs = [np.random.default_rng(20_000 + rank).integers(0, 100, 100) for rank in (0, 1)]
    wrong = int(np.count_nonzero(inputs[0]) + np.count_nonzero(inputs[1]))
    (told,) = re.findall(r"! mpich: (\d+) wrong items at 400 bytes", result.stdout)
    assert abs(int(told) - wrong) <= 10  # other random numbers, as many zeros
    assert "left out from now on: mpich: MemoryError: too long" in result.stderr


def test_an_interrupted_bench_leaves_nothing(launch: Launch) -> None:
    prefix = stand_in(launch.directory)
    words = ("broadcast", "--sizes", "4M", "--rounds", "100000", "--vs", "mpich")
    launcher = ("-m", "rallypoint", "bench")
    for number in (signal.SIGINT, signal.SIGTERM):
        process = launch.start(
            *words, launcher=launcher, environ={"RALLYPOINT_MPI_ENV": f"mpich={prefix}"}
        )
        deadline = time.monotonic() + 60
        while len(launch.running()) < 6 or "bytes" not in launch.out:
            # bench, run, two workers of each; the table begins
            assert time.monotonic() < deadline, launch.err
            assert process.poll() is None, launch.err
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == 128 + number
        assert "Traceback" not in launch.err
        assert launch.left_over(within_s=SOON_S) == []
        assert list(launch.directory.glob("rallypoint*")) == []


def test_what_cannot_be(tmp_path: Path) -> None:
    for words, status, message in (
        (["all_reduc"], 2, "unknown operation 'all_reduc'; choose one of all_reduce"),
        (["send", "--nproc-per-node", "1"], 2, "send takes two ranks"),
        (["reduce", "--sizes", "8:x"], 2, "--sizes x is not a size; write it like 4096, 64K"),
        (["reduce", "--dtype", "float31"], 2, "--dtype float31 is unknown; it takes float32"),
        (["reduce", "--vs", "lam"], 2, "--vs lam is unknown; it takes gloo, mpich"),
        (["reduce", "--rounds", "0"], 2, "--rounds needs an integer of at least 1, not '0'"),
        (["reduce", "--json", "no/such"], 2, "--json no/such: that directory does not exist"),
        (["reduce", "--plot", "a.pdf"], 1, "--plot a.pdf: name a file that ends in .png"),
        (["reduce", "--mpi-env", "lam=x"], 2, "--mpi-env lam=x is not NAME=DIR"),
        (["reduce", "--vs", "mpich"], 1, "mpich is not installed; add --get-mpi to put it into"),
        (
            ["reduce", "--vs", "mpich", "--mpi-env", f"mpich={tmp_path}"],
            1,
            "it has no program bin/python; name a virtual environment with mpi4py and mpich",
        ),
        (["barrier", "--algorithm", "none"], 1, "InvalidArgumentError: there is no algorithm"),
    ):
        result = bench(*words, directory=tmp_path)
        assert (result.returncode, message in result.stderr) == (status, True), result.stderr
