"""How far a job is, and which rank keeps it waiting, as commands tell it while it runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import wait_until
from tests.system.test_flight_record import record_of
from tests.system.test_jobs import rallypoint

from rallypoint.base.flight_record import read_steps
from rallypoint.base.recorded_steps import RecordedSteps
from rallypoint.base.worker_hook import FLIGHT_RECORD_BYTES

pytestmark = pytest.mark.system

NEEDS_TORCH = pytest.mark.needs_torch
TOLD = """
import os, pathlib, time, rallypoint
for step in range(25):
    rallypoint.progress(step + 1, 1000, loss=float("nan"))
    time.sleep(0.01)
pathlib.Path("ready").touch()
time.sleep(1000)
"""
OPTIMIZERS = """
import os, pathlib, torch
model = torch.nn.Linear(2, 2)
first, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
def backward(factor):
    loss = model(torch.ones(2)).sum() * factor
    scaler.scale(loss).backward()
for step in range(5):
    for _ in range(2):  # accumulated
        backward(1.0)
    scaler.step(first)
    scaler.update()
    first.zero_grad()
    other.step()
    other.step()
backward(float("inf"))
scaler.step(first)  # skipped
scaler.update()
pathlib.Path("ready").touch()
import time; time.sleep(1000)
"""
ELASTIC = """
import os, pathlib, signal, time, numpy, rallypoint as dist
from rallypoint import elastic
state = elastic.State(step=0)
@elastic.run(min_size=2)
def train(state):
    while not os.path.exists("enough"):
        time.sleep(0.01)
        if state.step == 10 and dist.get_rank() == 1 and not os.path.exists("killed"):
            pathlib.Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with state.update():
            state.step += 1
        if state.step == 25: pathlib.Path(f"ready.{dist.get_rank()}").touch()
dist.init_process_group()
train(state)
"""


def steps_of(launch: Launch, slot: int = 0) -> RecordedSteps:
    record = record_of(launch)
    found = read_steps(record, slot * FLIGHT_RECORD_BYTES)
    os.close(record)
    assert found is not None
    return found


def test_what_the_program_tells(launch: Launch) -> None:
    process = launch.start("--nproc-per-node", "2", launch.script(TOLD))
    launch.wait_for("ready")
    printed = rallypoint("status", str(process.pid)).stdout
    shown = r"^step 25 of 1,000, 2 %(, [\d:.]+ m?s left)?, \d+ ms for each step$"
    assert re.search(shown, printed, re.MULTILINE), printed


@NEEDS_TORCH
@pytest.mark.parametrize("flags", [(), ("--preload", "torch")], ids=["", "preload"])
def test_steps_of_an_optimizer_are_counted(launch: Launch, flags: tuple[str, ...]) -> None:
    """Of the one that stepped first; what a GradScaler skips is none."""
    launch.start("--nproc-per-node", "1", *flags, launch.script(OPTIMIZERS))
    launch.wait_for("ready")
    found = steps_of(launch)
    assert (found.step, found.total, found.source) == (5, None, "optimizer")


def test_steps_of_a_job_that_goes_on_in_place(launch: Launch) -> None:
    """The newcomer, whose record is elsewhere, counts where the others are."""
    flags = ("--nproc-per-node", "2", "--spares", "1")
    process = launch.start(*flags, launch.script(ELASTIC))
    launch.wait_for("ready.*", 2)
    assert (launch.directory / "killed").exists()
    steps = {slot: steps_of(launch, slot) for slot in (0, 2)}
    for slot, found in steps.items():
        assert found.source == "elastic"
        assert found.step >= 25
        assert found.log[0][1] == (1 if slot == 0 else pytest.approx(11, abs=1))
    assert re.search(r"^step \d\d+, ", rallypoint("status", str(process.pid)).stdout, re.MULTILINE)
    (launch.directory / "enough").touch()
    assert process.wait(60) == 0


BEGIN = {
    "rallypoint": "import numpy as np, rallypoint as dist\n"
    "dist.init_process_group()\n"
    "def ones(n): return np.ones(n, np.float32)\n",
    "gloo": "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "def ones(n): return torch.ones(n)\n",
    "ddp": "import torch, torch.distributed as dist\n"
    "dist.init_process_group('rallypoint')\n"
    "def ones(n): return torch.ones(n)\n",
}
BEGIN["ddp of gloo"] = BEGIN["gloo"]
STEPS = """
import pathlib, sys, time
calls, slow = map(int, sys.argv[1:])
rank, arrays = dist.get_rank(), [ones(8 + 100 * n) for n in range(min(calls, 7))]
def load():
    time.sleep(0.06)  # HERE
for step in range(10**9):
    for call in range(calls):
        time.sleep(0.05 / calls)
        if rank == slow and call == calls // 2: load()
        dist.all_reduce(arrays[call % len(arrays)])
    if step == 10: pathlib.Path(f"ready.{rank}").touch()
"""
DDP = """
import pathlib, sys, time
calls, slow = map(int, sys.argv[1:])
rank = dist.get_rank()
def load():
    time.sleep(0.06)  # HERE
layers = [torch.nn.Linear(64, 64) for _ in range(calls)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(10**9):
    time.sleep(0.05)
    if rank == slow: load()
    model(torch.ones(64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 10: pathlib.Path(f"ready.{rank}").touch()
"""


@pytest.mark.parametrize(
    ("kind", "ranks", "calls", "slow"),
    [
        pytest.param("rallypoint", 4, 1, 0, marks=pytest.mark.everyday),
        ("rallypoint", 4, 121, 3),
        ("rallypoint", 8, 7, 5),
        pytest.param("gloo", 4, 7, 2, marks=NEEDS_TORCH),
        pytest.param("ddp", 4, 7, 1, marks=NEEDS_TORCH),
        pytest.param("ddp of gloo", 4, 7, 2, marks=NEEDS_TORCH),
    ],
)
def test_a_slow_rank_is_named(launch: Launch, kind: str, ranks: int, calls: int, slow: int) -> None:
    script = launch.script(BEGIN[kind] + (DDP if kind.startswith("ddp") else STEPS))
    line = 1 + Path(script).read_text().splitlines().index("    time.sleep(0.06)  # HERE")
    process = launch.start("--nproc-per-node", str(ranks), script, str(calls), str(slow))
    launch.wait_for("ready.*", ranks)

    def is_named() -> bool:
        printed = rallypoint("explain", str(process.pid)).stdout
        print(printed)
        return f"slow rank {slow}: others wait for it" in printed and f"worker.py:{line}" in printed

    wait_until(is_named)
    found = json.loads(rallypoint("explain", "--json", str(process.pid)).stdout)
    assert [each["rank"] for each in found["slow"]] in ([slow], [])
