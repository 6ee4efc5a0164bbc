"""Programs that save when they are asked to end: what they see, and how the job goes on later."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

DIGITS = Path(__file__).parents[2] / "examples" / "train_digits_elastic.py"
# Each worker works until it is asked to end, and writes down what it then knows.
WORKER = """
import os, pathlib, time
import rallypoint
assert not rallypoint.preempted() and rallypoint.time_left() is None
pathlib.Path("up." + os.environ["RANK"]).touch()
while not rallypoint.preempted():
    time.sleep(0.01)
pathlib.Path("left." + os.environ["RANK"]).write_text(str(rallypoint.time_left()))
"""


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        pytest.param(["--shutdown-timeout", "600"], signal.SIGTERM, marks=pytest.mark.everyday),
        (["--signals-to-handle", "SIGTERM,SIGUSR1"], signal.SIGUSR1),
    ],
    ids=["the usual signal", "a chosen one"],
)
def test_workers_learn_that_they_are_to_end_and_when(
    launch: Launch, flags: list[str], number: signal.Signals
) -> None:
    process = launch.start("--nproc-per-node", "2", *flags, launch.script(WORKER))
    launch.wait_for("up.*", 2)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    default_s, limit_s = 30.0, 600.0 if "--shutdown-timeout" in flags else 30.0
    for rank in range(2):
        left_s = float((launch.directory / f"left.{rank}").read_text())
        assert limit_s - default_s < left_s <= limit_s  # the flag counts, not the default


def test_a_job_saves_leaves_and_goes_on_when_it_is_started_again(launch: Launch) -> None:
    """No step is computed twice, and the result is that of a job that nobody stopped."""
    words = ["--nproc-per-node", "2", str(DIGITS), "--epochs", "2", "--checkpoint"]
    assert launch.run(*words, "whole.npz") == 0
    whole = launch.out
    words.append("parts.npz")
    process = launch.start(*words, "--checkpoint-every", "5", "--pause", "0.2")
    launch.wait_for("parts.npz")
    process.terminate()
    assert process.wait(60) == 143
    saved = re.search(r"asked to end: saved after step (\d+)", launch.out)
    assert saved is not None, launch.out + launch.err
    assert 0 < int(saved[1]) < 40
    assert launch.run(*words) == 0
    assert f"workers continue after step {saved[1]}\n" in launch.out
    assert launch.out.splitlines()[-1] == whole.splitlines()[-1]  # the accuracy


def test_a_handler_that_was_there_is_still_called(launch: Launch) -> None:
    """As with Lightning's; and submitit's signal remains its own."""
    script = launch.script(
        """
import os, pathlib, signal, time
import rallypoint
def note(number, frame): pathlib.Path(f"noted.{number}").touch()
signal.signal(signal.SIGTERM, note)
signal.signal(signal.SIGUSR2, note)
rallypoint.preempted()
pathlib.Path("up").touch()
while not pathlib.Path("noted.12").exists(): time.sleep(0.01)
assert not rallypoint.preempted()
pathlib.Path("heard").touch()
while not rallypoint.preempted(): time.sleep(0.01)
pathlib.Path("done").touch()
"""
    )
    process = launch.start("--nproc-per-node", "1", script)
    launch.wait_for("up")
    process.send_signal(signal.SIGUSR2)
    launch.wait_for("heard")
    process.terminate()
    assert process.wait(60) == 143
    assert (launch.directory / "noted.15").exists()
    assert (launch.directory / "done").exists()


@pytest.mark.seldom
def test_lightning_learns_of_it_too(launch: Launch) -> None:
    if find_spec("pytorch_lightning") is None:
        if os.environ.get("RALLYPOINT_REQUIRE_ALL") == "1":
            pytest.fail("PyTorch Lightning is not installed")
        pytest.skip("without PyTorch Lightning")
    script = launch.script(
        """
import pathlib, time
import pytorch_lightning, rallypoint, torch

class Module(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, number):
        pathlib.Path("saw." + str(rallypoint.preempted())).touch()
        time.sleep(0.05)
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = pytorch_lightning.Trainer(
    accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
try:
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4000, 4)))
except SystemExit as end:  # Lightning's SIGTERMException
    pathlib.Path("lightning." + type(end).__name__).touch()
    raise
"""
    )
    process = launch.start("--nproc-per-node", "1", script)
    launch.wait_for("saw.False")
    process.terminate()
    assert process.wait(60) == 143
    assert (launch.directory / "lightning.SIGTERMException").exists(), launch.err


def run_alone(text: str, **environ: str) -> subprocess.Popen[str]:
    """A program without a launcher, once it has printed a line."""
    inherited = {name: value for name, value in os.environ.items() if "TORCHELASTIC" not in name}
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**inherited, **environ},
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_forked_child_ends_when_its_parent_asks() -> None:
    """A data loader's workers, say, are ended by SIGTERM."""
    text = """
import multiprocessing, time, rallypoint
rallypoint.preempted()
print("up", flush=True)
for _ in range(50):  # at once, too
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    child.terminate()
    child.join(10)
    assert child.exitcode == -15, child.kill()
print(rallypoint.preempted())
"""
    assert run_alone(text).communicate(timeout=60)[0] == "False\n"


def test_who_never_asks_is_ended() -> None:
    process = run_alone("import rallypoint, time; print(flush=True); time.sleep(600)")
    process.terminate()
    process.communicate()
    assert process.returncode == -signal.SIGTERM


def test_the_end_of_a_slurm_job_is_the_time_left() -> None:
    text = """
import rallypoint, time
rallypoint.preempted()
print("up", flush=True)
while not rallypoint.preempted(): time.sleep(0.01)
print(rallypoint.time_left())
"""
    names = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGUSR1"}
    for end, low, high in ((time.time() + 500, 400, 500), (time.time() - 5, 0, 0)):
        process = run_alone(text, **names, SLURM_JOB_END_TIME=str(int(end)))
        process.send_signal(signal.SIGUSR1)
        assert low <= float(process.communicate(timeout=60)[0]) <= high
    process = run_alone(text)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "None\n"


def test_the_first_question_is_for_the_main_thread() -> None:
    text = """
import threading, rallypoint
def ask():
    try: rallypoint.preempted()
    except rallypoint.CallerError as error: print(error)
thread = threading.Thread(target=ask)
print(flush=True)
thread.start()
thread.join()
print(rallypoint.preempted())
"""
    told, asked = run_alone(text).communicate(timeout=60)[0].splitlines()
    assert told.startswith("preempted() must first be called in the main thread")
    assert asked == "False"
