"""Jobs that hang, each for a reason of its own: `rallypoint explain` names the rank and the line.

The sentences for each situation are held by tests/unit/diagnosis. Here is what only real processes
show: a sleep, a signal that stops, the GIL, the kernel, a death, a data loader's children, and what
PyTorch's recorder knows. The programs run with arrays of NumPy ("N") or with PyTorch's gloo ("G").
The launcher knows nothing of them but the command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.system.conftest import Launch
from tests.system.everyday import LEAST_BOUND_S

pytestmark = pytest.mark.system

NEEDS_TORCH = pytest.mark.needs_torch
BEGIN = {
    "N": "import numpy as np, rallypoint as dist\n"
    "dist.init_process_group()\n"
    "def ones(n=8): return np.ones(n, np.float32)\n",
    "G": "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "def ones(n=8): return torch.ones(n)\n",
}
# A rank that is ready says its process number.
COMMON = """
import ctypes, os, pathlib, signal, sys, threading, time
rank, size, culprit = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
for _ in range(3):
    dist.all_reduce(ones())
pathlib.Path(f"part.{rank}").write_text(str(os.getpid()))
os.rename(f"part.{rank}", f"ready.{rank}")
"""
RANKS = 3
SPIN = "void spin(void) { volatile int on = 1; while (on) {} }"
VFORK = """#include <unistd.h>
void wait_for_child(void) { if (vfork() == 0) { sleep(600); _exit(0); } }"""
TELLS_GIL = sys.version_info < (3, 12)
HOLDS_GIL = "probably holds the GIL in C code called at" if TELLS_GIL else "runs at"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and what must be said of it.

    Attributes:
        body: what comes after the first three collectives; a line that ends with ``# NAME`` is
            known as {NAME} below.
        says: parts of the sentence, in this order; {c} is the culprit, {others} are the others.
        signal: what the culprit gets then.
        source: in C; the program loads it as ./hang.so.
    """

    body: str
    says: tuple[str, ...]
    signal: int = 0
    source: str = ""


SLEEPS = """
if rank == culprit:
    time.sleep(600)  # HERE
dist.all_reduce(ones())  # WAIT
"""
CASES = {
    "sleeps": Case(
        body=SLEEPS,
        says=("rank {c} never entered all_reduce #", "sleep at {HERE}", "{others} wait", "{WAIT}"),
    ),
    "is stopped": Case(
        body=SLEEPS,
        says=("rank {c} is stopped (SIGSTOP)", "{others} wait", "kill -CONT {pid}"),
        signal=signal.SIGSTOP,
    ),
    "keeps the GIL": Case(
        body="""
if rank == culprit:
    ctypes.PyDLL("./hang.so").spin()  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} ", f"{HOLDS_GIL} {{HERE}} (", "% CPU in hang.so)", "{others} wait"),
        source=SPIN,
    ),
    "is in the kernel": Case(
        body="""
if rank == culprit:
    ctypes.CDLL("./hang.so").wait_for_child()  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c}", "in the kernel (D)", "{others} wait"),
        source=VFORK,
    ),
    "waits for its data loader": Case(
        body="""
if rank == culprit:
    os.mkfifo("pipe")
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        if rank == culprit:
            open("pipe").read()
        return ones()
for batch in torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=2):  # HERE
    dist.all_reduce(batch)  # WAIT
time.sleep(600)
""",
        says=("rank {c}'s data loader", "pipe", "{others} wait", "{WAIT}"),
    ),
}


def explain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rallypoint", "explain", *words]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def wait_until_explained(job: int, parts: tuple[str, ...]) -> None:
    """Until `explain` says these parts, in this order: waits must last before they count."""
    deadline = time.monotonic() + LEAST_BOUND_S
    while True:
        done = explain(str(job), "--why")
        sentence = done.stdout.partition("\n")[0]
        if in_order(parts, sentence) and done.returncode == 3:
            return
        assert time.monotonic() < deadline, f"{done} does not say {parts}"


def places(script: Path) -> dict[str, str]:
    """Where the lines are that have a name."""
    lines = script.read_text().splitlines()
    named = ((line.rpartition("# ")[2], number) for number, line in enumerate(lines, 1))
    return {name: f"{script.name}:{number}" for name, number in named if name.isupper()}


def in_order(parts: tuple[str, ...], text: str) -> bool:
    at = 0
    for part in parts:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return True


def others_than(culprit: int) -> str:
    return {0: "ranks 1-2", 1: "ranks 0, 2", 2: "ranks 0-1"}[culprit]


def compiled(directory: Path, source: str) -> None:
    """As hang.so there."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed: apt install gcc")
    (directory / "hang.c").write_text(source)
    command = ["cc", "-O1", "-shared", "-fPIC", "hang.c", "-o", "hang.so"]
    subprocess.run(command, cwd=directory, check=True)


def start(launch: Launch, text: str, culprit: int, **environ: str) -> dict[str, object]:
    """A job, until all ranks are ready; what the parts of a sentence may name."""
    script = Path(launch.script(text))
    launch.start("--nproc-per-node", str(RANKS), str(script), str(culprit), environ=environ)
    launch.wait_for("ready.*", RANKS)
    pid = int((launch.directory / f"ready.{culprit}").read_text())
    return {**places(script), "c": culprit, "others": others_than(culprit), "pid": pid}


@pytest.mark.parametrize(
    ("title", "kind", "culprit"),
    [
        pytest.param("sleeps", "N", 1, marks=pytest.mark.everyday),
        pytest.param("sleeps", "G", 0, marks=NEEDS_TORCH),
        pytest.param("is stopped", "N", 2, marks=pytest.mark.everyday),
        pytest.param("keeps the GIL", "N", 0, marks=pytest.mark.everyday),
        pytest.param("is in the kernel", "N", 1, marks=pytest.mark.everyday),
        pytest.param("waits for its data loader", "G", 1, marks=NEEDS_TORCH),
    ],
)
def test_live(launch: Launch, title: str, kind: str, culprit: int) -> None:
    case = CASES[title]
    if case.source:
        compiled(launch.directory, case.source)
    known = start(launch, BEGIN[kind] + COMMON + case.body, culprit)
    if case.signal:
        os.kill(int(str(known["pid"])), case.signal)
    assert launch.process is not None
    wait_until_explained(launch.process.pid, tuple(part.format(**known) for part in case.says))


def test_a_job_that_was_stopped_is_explained_afterwards(launch: Launch) -> None:
    known = start(launch, BEGIN["N"] + COMMON + SLEEPS, 1)
    parts = tuple(part.format(**known) for part in CASES["sleeps"].says)
    assert launch.process is not None
    wait_until_explained(launch.process.pid, parts)
    launch.process.send_signal(signal.SIGTERM)
    assert launch.process.wait(60) == 128 + signal.SIGTERM
    told = launch.err.partition("  at that time: ")[2].partition("\n")[0]
    assert in_order(parts, told), launch.err
    assert explain(str(launch.process.pid)).stdout.startswith(told)
    answer = json.loads(explain(str(launch.process.pid), "--json").stdout)
    assert (answer["sentence"], answer["exit_status"]) == (told, 3)


DIES = """
if rank == culprit:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ones())
"""
RUNS_OUT_OF_MEMORY = """
if rank == culprit:
    all = b"x" * (1 << 30)
dist.all_reduce(ones())
"""


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[list[str]]:
    """A control group with that limit: what to put before a command to run it there."""
    first = Path("/sys/fs/cgroup/memory")
    place = (first if first.is_dir() else first.parent) / f"rallypoint-test-{os.getpid()}"
    file = "memory.limit_in_bytes" if first.is_dir() else "memory.max"
    try:
        place.mkdir()
        (place / file).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            place.rmdir()
        pytest.skip(f"cannot make a control group with a memory limit: {error}")
    yield ["sh", "-c", f'echo $$ > {place}/cgroup.procs; exec "$@"', "sh"]
    for _ in range(100):
        try:
            return place.rmdir()
        except OSError:  # something in it is still ending
            time.sleep(0.1)


def explain_failure(launch: Launch, body: str, before: list[str]) -> str:
    """What is said of a job that has failed."""
    script = launch.script(BEGIN["N"] + COMMON + body)
    process = launch.start("--nproc-per-node", str(RANKS), script, "1", before=before)
    assert process.wait(60) == 1, launch.err
    done = explain(str(process.pid))
    assert done.returncode == 3, done
    assert "with exit status 1" in done.stdout
    return done.stdout


@pytest.mark.everyday
def test_a_job_with_a_rank_that_was_killed(launch: Launch) -> None:
    told = explain_failure(launch, DIES, [])
    assert told.startswith("rank 1 is dead (SIGKILL, not by the launcher")
    unasked = explain()
    title, _, sentence = unasked.stdout.partition("\n")
    assert title.startswith("no job runs here; the last record: job ")
    assert title.endswith(" with exit status 1:")
    assert sentence.startswith("rank 1 is dead (SIGKILL, not by the launcher")
    assert unasked.returncode == 3


def test_a_job_that_ran_out_of_memory(launch: Launch) -> None:
    with memory_limit(900 << 20) as before:
        told = explain_failure(launch, RUNS_OUT_OF_MEMORY, before)
    assert told.startswith("rank 1 is dead (SIGKILL, ")
    assert "out-of-memory killer struck once" in told


ENDS_EARLY = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.needs_torch
def test_a_job_of_gloo_with_a_rank_that_ended_early(launch: Launch) -> None:
    script = launch.script(ENDS_EARLY)
    process = launch.start("--nproc-per-node", "2", script)
    assert process.wait(60) == 1, launch.err
    assert "; rank 1 had ended before, with code 0" in launch.err
    assert "other_backends.py" not in launch.err
    done = explain(str(process.pid))
    assert done.returncode == 3, done
    # The first where rank 0's call was still recorded as running.
    ends = ("rank 1 has ended (code 0)", "; rank 1 had ended before, with code 0.")
    assert any(end in done.stdout for end in ends), done.stdout


@pytest.mark.needs_torch
def test_without_pytorchs_recorder(launch: Launch) -> None:
    known = start(launch, BEGIN["G"] + COMMON + SLEEPS, 1, TORCH_FR_BUFFER_SIZE="0")
    says = ("rank 1 ", "sleep at {HERE}", "operation numbers unknown", "{others} probably wait")
    assert launch.process is not None
    wait_until_explained(launch.process.pid, tuple(part.format(**known) for part in says))


DIFFERS = """
if rank == culprit:
    dist.broadcast(ones(), src=culprit)  # CALL
else:
    dist.all_reduce(ones())  # HERE
"""


@pytest.mark.needs_torch
def test_different_operations_without_pytorchs_recorder(launch: Launch) -> None:
    known = start(launch, BEGIN["G"] + COMMON + DIFFERS, 1, TORCH_FR_BUFFER_SIZE="0")
    says = (
        "probably ranks called different operations: rank 1 in broadcast at {CALL}",
        "{others} in all_reduce at {HERE}.",
    )
    assert launch.process is not None
    wait_until_explained(launch.process.pid, tuple(part.format(**known) for part in says))


@pytest.mark.everyday
def test_nothing_is_kept_of_a_job_that_succeeded(launch: Launch) -> None:
    process = launch.start(launch.script("pass"))
    assert process.wait(60) == 0
    assert explain(str(process.pid)).returncode == 5


HEALTHY = """
import random
chance = random.Random(f"{sys.argv[1]} {rank}")
group = dist.new_group([0, 1])
while True:
    time.sleep(chance.choice([0, 0, 0, 0.001, 0.05, 0.4]))
    which = random.Random(len(seen)).randrange(4)
    seen.append(which)
    if which == 0:
        dist.all_reduce(ones(1000))
    elif which == 1:
        dist.broadcast(ones(), src=len(seen) % size)
    elif which == 2 and rank < 2:
        dist.all_reduce(ones(), group=group)
    elif which == 3 and rank < 2:
        (dist.send if rank == len(seen) % 2 else dist.recv)(ones(), 1 - rank)
"""


@pytest.mark.parametrize("kind", ["N", pytest.param("G", marks=NEEDS_TORCH)])
def test_healthy_jobs_are_not_said_to_hang(launch: Launch, kind: str, seed: int) -> None:
    chance = random.Random(seed)
    script = launch.script(BEGIN[kind] + COMMON + "seen = []\n" + HEALTHY)
    process = launch.start("--nproc-per-node", str(RANKS), script, str(seed))
    launch.wait_for("ready.*", RANKS)
    for _ in range(int(os.environ.get("RALLYPOINT_TEST_HEALTHY", "4"))):
        time.sleep(chance.random())  # any moment must do
        done = explain(str(process.pid), "--why")
        assert done.returncode == 0, done.stdout
        assert done.stdout.startswith("no hang")
    assert process.poll() is None, launch.err
