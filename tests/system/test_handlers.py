"""Calls that signal handlers make in the middle of other calls: they come after these, on all
ranks, or are refused at once, and nobody waits for ever."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.handlers import CALLS

pytestmark = [pytest.mark.system, pytest.mark.exact]

DOORS = [
    "arrays",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(not find_spec("torch"), reason="no PyTorch: pip install torch"),
    ),
]
FEW = ["all_reduce:all_reduce", "barrier:receive", "receive:store", "wait:objects"]
FEW += ["objects:barrier", "new_group:new_group", "store:store"]


def outcome_of(outer: str, inner: str) -> str:
    """What is to come of a handler's call."""
    if outer != "objects":
        return "made"
    return "timed out" if inner == "store" else "refused"


def go_through(door: str, size: int, pairs: list[str]) -> None:
    # To torch, a group that could not be made has a number all the same, which the other rank does
    # not count in this program.
    pairs = sorted(pairs, key=lambda pair: pair == "objects:new_group")
    program = Path(__file__).with_name("handlers.py")
    run = subprocess.run(
        [sys.executable, str(program), door, str(size), *pairs],
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    said = [line.split(" ", 1) for line in run.stdout.splitlines()]
    assert said == [[pair, outcome_of(*pair.split(":"))] for pair in pairs]
    assert run.returncode == 0


@pytest.mark.everyday
@pytest.mark.parametrize("door", DOORS)
def test_a_call_in_a_handler(door: str) -> None:
    go_through(door, 1000, FEW)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("size", [1000, pytest.param(3_000_000, marks=pytest.mark.seldom)])
@pytest.mark.parametrize("door", DOORS)
def test_each_call_in_a_handler_that_interrupts_each(door: str, size: int) -> None:
    """Of large arrays, the interrupted call is far from complete when the handler's begins."""
    calls = (*CALLS, *(["send"] if size > 1000 else []))
    go_through(door, size, [":".join(pair) for pair in product(calls, calls)])


LIGHTNING = """
import os, pathlib, signal, sys, time
NUMBER = signal.Signals[sys.argv[1]]
import torch, torch.distributed as dist
import pytorch_lightning
from pytorch_lightning.plugins.environments import SLURMEnvironment
from pytorch_lightning.strategies import DDPStrategy

rank = int(os.environ["RANK"])
os.environ |= {
    "SLURM_JOB_ID": "1", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
    "SLURM_NODEID": "0", "SLURM_JOB_NAME": "job",
}
pid_of_0 = pathlib.Path("pid")
saved = pathlib.Path("hpc_ckpt_1.ckpt")

class Environment(SLURMEnvironment):
    main_address = property(lambda self: os.environ["MASTER_ADDR"])
    main_port = property(lambda self: int(os.environ["MASTER_PORT"]))

def await_sleep(pid):
    seen, times = "", 0
    while times < 5:
        fields = pathlib.Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        now = " ".join([fields[0], *fields[11:13]])
        times = times + 1 if now == seen and fields[0] == "S" else 0
        seen = now
        time.sleep(0.003)

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        if number == 3:
            value = torch.ones(1000)
            if rank == 0:
                pathlib.Path("pid.part").write_text(str(os.getpid()))
                os.rename("pid.part", "pid")
                dist.all_reduce(value)
            else:
                while not pid_of_0.exists(): time.sleep(0.01)
                pid = int(pid_of_0.read_text())
                await_sleep(pid)
                os.kill(pid, NUMBER)
                while NUMBER == signal.SIGUSR1 and not saved.exists(): time.sleep(0.01)
                dist.all_reduce(value)
                os.kill(os.getpid(), NUMBER)
            assert bool((value == 2).all())
            pathlib.Path(f"over.{rank}").touch()
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pytorch_lightning.Trainer(
    accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=os.getcwd(),
    strategy=DDPStrategy(process_group_backend="rallypoint"), plugins=[Environment()],
)
try:
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(64, 4)))
except SystemExit as end:
    pathlib.Path(f"ended.{rank}.{type(end).__name__}").touch()
    trainer.save_checkpoint("late.ckpt")
else:
    pathlib.Path(f"ended.{rank}").touch()
"""


@pytest.mark.needs_torch
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGTERM"])
def test_lightnings_handlers_in_the_middle_of_an_all_reduce(launch: Launch, name: str) -> None:
    """On SIGUSR1 under Slurm it saves a checkpoint, with a barrier; on SIGTERM it broadcasts."""
    pytest.importorskip("pytorch_lightning")
    script = launch.script(LIGHTNING)
    assert launch.run("--nproc-per-node", "2", script, name) == 0, launch.err
    saved = "hpc_ckpt_1.ckpt" if name == "SIGUSR1" else "late.ckpt"
    assert (launch.directory / saved).exists(), launch.err
    ended = {path.name for path in launch.directory.glob("ended.*")}
    end = "" if name == "SIGUSR1" else ".SIGTERMException"
    assert ended == {f"ended.{rank}{end}" for rank in range(2)}
