"""Jobs that hang, each for a reason of its own: `rallypoint explain` names the rank and the line.

The same programs run with arrays of NumPy ("N"), with PyTorch's gloo ("G"), with our backend in
PyTorch ("T"), with one that only PyTorch's hooks record ("H"), with gloo behind our API ("D"), and
with the culprit first and last among the ranks. The launcher knows nothing of them but the command
line.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import EACH_WAY, SOON_S
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

BEGIN = {
    "N": "import numpy as np, rallypoint as dist\n"
    "dist.init_process_group()\n"
    "def ones(n=8): return np.ones(n, np.float32)\n",
    "G": "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "def ones(n=8): return torch.ones(n)\n",
    "D": "import numpy as np, rallypoint as dist\n"
    "dist.init_process_group('gloo')\n"
    "def ones(n=8): return np.ones(n, np.float32)\n",
    "H": "import torch, torch.distributed as dist\n"
    "class Other(torch._C._distributed_c10d.Backend):\n"
    "    def __init__(self, store, rank, size, timeout):\n"
    "        super().__init__(rank, size)\n"
    "        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)\n"
    "    def getBackendName(self): return 'other'\n"
    "    def allreduce(self, *given): return self.gloo.allreduce(*given)\n"
    "    def barrier(self, *given): return self.gloo.barrier(*given)\n"
    "    def send(self, *given): return self.gloo.send(*given)\n"
    "    def recv(self, *given): return self.gloo.recv(*given)\n"
    "dist.Backend.register_backend('other', Other, devices=['cpu'])\n"
    "dist.init_process_group('other')\n"
    "def ones(n=8): return torch.ones(n)\n",
    "T": "import torch, torch.distributed as dist\n"
    "dist.init_process_group('rallypoint')\n"
    "def ones(n=8): return torch.ones(n)\n",
}
COMMON = """
import ctypes, os, pathlib, signal, sys, threading, time
rank, size, culprit = dist.get_rank(), dist.get_world_size(), int(sys.argv[1])
for _ in range(3):
    dist.all_reduce(ones())
pathlib.Path(f"ready.{rank}").touch()
"""
NEVER_JOINS = """
import os, pathlib, sys, time
if os.environ["RANK"] == sys.argv[1]:
    pathlib.Path("ready.late").touch()
    time.sleep(600)  # HERE
"""
ENOUGH_S = 2.5  # for a wait to count as one
SPIN = "void spin(void) { volatile int on = 1; while (on) {} }"
TELLS_GIL = sys.version_info < (3, 12)
HOLDS_GIL = "probably holds the GIL in C code called at" if TELLS_GIL else "runs at"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, and what must be said of it.

    Attributes:
        body: what comes after the first three collectives; a line that ends with ``# NAME`` is
            known as {NAME} below.
        says: parts of the sentence, in this order; {c} is the culprit, {others} are the others.
        says_after: the same, once somebody has ended the job; empty: they are the same.
        status: what `explain` exits with.
        joins: the culprit takes part at first; else it sleeps before it joins.
        ready: begin of the names of the files that say that the ranks are about to get there.
        later_s: how long it takes until all are where they are to be.
        signal: what it gets then.
        files: sources in C, to be compiled.
    """

    body: str
    says: tuple[str, ...]
    says_after: tuple[str, ...] = ()
    kinds: str = "NGT"
    ranks: int = 3
    status: int = 3
    joins: bool = True
    ready: str = "ready"
    later_s: float = 0
    signal: int = 0
    files: dict[str, str] = field(default_factory=dict)


CASES = {
    "a rank sleeps": Case(
        body="""
if rank == culprit:
    time.sleep(600)  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} never entered all_reduce #", "sleep at {HERE}", "{others} wait", "{WAIT}"),
        kinds="NGTHD",
    ),
    "other operations under one number": Case(
        body="""
if rank == culprit:
    dist.barrier()  # HERE
dist.all_reduce(ones())  # WAIT
time.sleep(600)
""",
        says=("rank {c}", "barrier", "{others}", "all_reduce"),
        kinds="G",
    ),
    "stopped": Case(
        body="""
if rank == culprit:
    time.sleep(600)
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} is stopped (SIGSTOP)", "{others} wait", "kill -CONT {pid}"),
        signal=signal.SIGSTOP,
    ),
    "each waits for the other": Case(
        body="""
dist.recv(ones(), 1 - rank)  # HERE
""",
        says=("deadlock: rank 0 waits for rank 1 in recv", "{HERE}", "rank 1 for rank 0"),
        kinds="GH",  # our engine finds such circles itself, and raises
        ranks=2,
    ),
    "a ring of sends": Case(
        body="""
dist.send(ones(1 << 22), (rank + 1) % size)  # HERE
""",
        says=("deadlock: rank 0 waits for rank 1 in send", "{HERE}", "rank 2", "rank 3 for rank 0"),
        kinds="G",
        ranks=4,
    ),
    "two groups crossed": Case(
        body="""
one, other = dist.new_group([0, 1]), dist.new_group([0, 1])
first, second = (one, other) if rank == culprit else (other, one)
dist.all_reduce(ones(), group=first)  # HERE
dist.all_reduce(ones(), group=second)
""",
        says=("deadlock", "rank 0 waits", "all_reduce #0", "rank 1", "rank 0", "{HERE}"),
        kinds="NG",
        ranks=2,
    ),
    "a lock of its own": Case(
        body="""
lock = threading.Lock()
def keep():
    with lock:
        time.sleep(600)  # KEEP
if rank == culprit:
    threading.Thread(target=keep, daemon=True).start()
    time.sleep(0.5)
    lock.acquire()  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c}", "waits for a lock of its own process at {HERE}", "{others} wait"),
    ),
    "C code that keeps the GIL": Case(
        body="""
if rank == culprit:
    ctypes.PyDLL("./spin.so").spin()  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} ", f"{HOLDS_GIL} {{HERE}} (", "% CPU in spin.so)", "{others} wait"),
        # The last look is brief: on a busy machine the worker may not have run meanwhile.
        says_after=("rank {c} ", f"{HOLDS_GIL} {{HERE}}", "{others} wait"),
        files={"spin.c": SPIN},
    ),
    "C code that sleeps with the GIL": Case(
        body="""
if rank == culprit:
    threading.Thread(target=time.sleep, args=(600,)).start()
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} ", "holds the GIL in C code called at {HERE}", "{others} wait"),
        kinds="NG" if TELLS_GIL else "",
    ),
    "C code that gives the GIL back": Case(
        body="""
if rank == culprit:
    ctypes.CDLL("./spin.so").spin()  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} never entered", "runs at {HERE} (", "% CPU in spin.so)", "{others} wait"),
        kinds="NG",
        files={"spin.c": SPIN},
    ),
    "an endless loop": Case(
        body="""
if rank == culprit:
    while True:
        pass  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} never entered all_reduce", "runs at worker.py:", "% CPU", "{others} wait"),
    ),
    "in the kernel": Case(
        body="""
if rank == culprit:
    ctypes.CDLL("./vfork.so").wait_for_child()  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c}", "in the kernel (D)", "{others} wait"),
        files={
            "vfork.c": "#include <unistd.h>\n"
            "void wait_for_child(void) { if (vfork() == 0) { sleep(600); _exit(0); } }"
        },
    ),
    "uneven batches": Case(
        body="""
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
pathlib.Path(f"made.{rank}").touch()
for _ in range(2 if rank == culprit else 3):
    model(ones()).sum().backward()  # WAIT
if rank == culprit:
    time.sleep(600)  # HERE
""",
        says=("rank {c} never entered all_reduce", "sleep at {HERE}", "{others} wait", "{WAIT}"),
        kinds="GT",
        ready="made",  # DistributedDataParallel imports much
    ),
    "a data loader that hangs": Case(
        body="""
os.path.exists("pipe") or rank == culprit and os.mkfifo("pipe")
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
        kinds="G",
        ranks=2,
    ),
    "one that never joins": Case(
        body="",
        says=("rank {c} never joined", "{HERE}", "{others} wait"),
        joins=False,
        later_s=6,
    ),
    "a wrong tag": Case(
        body="""
if rank == culprit:
    dist.send(ones(), 1 - rank, tag=1)
else:
    dist.recv(ones(), 1 - rank, tag=0)  # WAIT
dist.all_reduce(ones())
""",
        says=("rank {c} sent tag 1 to {others}, which waits for tag 0", "{WAIT}"),
        kinds="NG",
        ranks=2,
    ),
    "a wrong tag, and something else": Case(
        body="""
if rank == culprit:
    dist.send(ones(), 1 - rank, tag=1)
    time.sleep(600)  # HERE
dist.recv(ones(), 1 - rank, tag=0)  # WAIT
""",
        says=("rank {c} sent tag 1 to {others}, which waits for tag 0 ({WAIT}); ", "{HERE}"),
        kinds="N",  # gloo's send waits for its receiver
        ranks=2,
    ),
    "a receive from anyone": Case(
        body="""
if rank == culprit:
    dist.recv(ones(), src=None, tag=3)  # ANY
elif rank == 1:
    time.sleep(600)  # HERE
dist.all_reduce(ones())  # WAIT
""",
        says=("rank 1 ", "sleep at {HERE}", "wait"),
        kinds="NG",
    ),
    "nobody waits": Case(
        body="""
time.sleep(600)
""",
        says=("no hang", "no rank waits for another"),
        kinds="NGTH",
        status=0,
    ),
    "a slow rank": Case(
        body="""
while True:
    if rank == culprit:
        until = time.monotonic() + 0.06
        while time.monotonic() < until:
            pass
    dist.all_reduce(ones())
""",
        says=("no hang", "rank {c} comes last in ", " of 3"),
        kinds="NT",
        status=0,
    ),
}
NEEDS_TORCH = [pytest.mark.needs_torch]
MARKS = {
    "N": [],
    "G": NEEDS_TORCH,
    "T": NEEDS_TORCH,
    "D": NEEDS_TORCH,
    "H": [
        *NEEDS_TORCH,
        pytest.mark.skipif(
            find_spec("torch") is not None
            and tuple(map(int, version("torch").split(".")[:2])) < (2, 15),
            reason="PyTorch before 2.15: no hooks that record",
        ),
    ],
}


def params(cases: Mapping[str, Any]) -> list[Any]:
    """Each case, of each kind, with the first or the last rank as the culprit.

    In `make check-long`; otherwise the culprits take turns, and so do our calls, gloo's, and ours
    in PyTorch.
    """
    found = []
    for i, (name, case) in enumerate(cases.items()):
        kinds = case.kinds
        culprits = [0, case.ranks - 1]
        if not EACH_WAY:
            culprits = [culprits[i % 2]]
            usual = [kind for kind in kinds if kind in "NGT"]
            its = i // 2 % max(1, len(usual))
            kinds = "".join([*usual[its : its + 1], *(kind for kind in kinds if kind in "DH")])
        found += [
            pytest.param(
                name,
                kind,
                culprit,
                id=f"{name.replace(' ', '-')}-{kind}-{culprit}",
                marks=MARKS[kind],
            )
            for kind in kinds
            for culprit in culprits
        ]
    return found


def explain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rallypoint", "explain", *words]
    began = time.monotonic()
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - began < max(5.0, SOON_S)
    return done


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


def name(ranks: list[int]) -> str:
    runs = f"{ranks[0]}-{ranks[-1]}" if ranks[-1] - ranks[0] == len(ranks) - 1 > 0 else ""
    text = runs or ", ".join(map(str, ranks))
    return f"rank{'s' * (len(ranks) > 1)} {text}"


@pytest.mark.parametrize(("title", "kind", "culprit"), params(CASES))
def test_live(launch: Launch, title: str, kind: str, culprit: int) -> None:
    case = CASES[title]
    for file, text in case.files.items():
        source = launch.directory / file
        source.write_text(text)
        library = source.with_suffix(".so")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
    late = "" if case.joins else NEVER_JOINS
    script = Path(launch.script(late + BEGIN[kind] + COMMON + case.body))
    process = launch.start("--nproc-per-node", str(case.ranks), str(script), str(culprit))
    launch.wait_for(f"{case.ready}.*", case.ranks if case.joins else 1)
    pids = worker_pids(process.pid)
    if case.signal:
        time.sleep(1)
        os.kill(pids[culprit], case.signal)
    try:
        time.sleep(ENOUGH_S + case.later_s)
        done = explain(str(process.pid), "--json")
        told = json.loads(done.stdout)
        others = [rank for rank in range(case.ranks) if rank != culprit]
        known = {**places(script), "c": culprit, "others": name(others), "pid": pids[culprit]}
        parts = tuple(part.format(**known) for part in case.says)
        sentence = told["sentence"]
        assert in_order(parts, sentence), f"{sentence!r} does not say {parts}"
        assert len(sentence) <= 240
        assert done.returncode == told["exit_status"] == case.status
        plain = explain(str(process.pid))
        assert plain.stdout.split()[:2] == sentence.split()[:2]
        if case.status == 3:
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 128 + signal.SIGTERM
            told = launch.err.partition("  at that time: ")[2].partition("\n")[0]
            ended = explain(str(process.pid)).stdout
            parts = tuple(part.format(**known) for part in case.says_after or case.says)
            assert in_order(parts, ended), f"{ended!r} does not say {parts} after the end"
            assert ended.startswith(told)
            assert told
    finally:
        if process.poll() is None:
            if case.signal == signal.SIGSTOP:
                os.kill(pids[culprit], signal.SIGCONT)
            process.kill()


def worker_pids(launcher: int) -> list[int]:
    command = [sys.executable, "-m", "rallypoint", "status", str(launcher)]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [int(pid) for pid in re.findall(r"(?m)^ *\d+ +\S+ +(\d+) ", told)]


@dataclass(frozen=True, kw_only=True)
class End:
    """A program that ends by itself; the rest as in `Case`."""

    body: str
    says: tuple[str, ...]
    kinds: str = "N"
    ranks: int = 3
    memory_bytes: int = 0


ENDS = {
    "killed": End(
        body="""
if rank == culprit:
    time.sleep(2)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(ones())  # WAIT
""",
        says=(
            "rank {c} is dead (SIGKILL, not by the launcher; the kernel's out-of-memory killer did "
            "not strike)",
            "{wait}",
        ),
        kinds="NGT",
    ),
    "out of memory": End(
        body="""
if rank == culprit:
    time.sleep(2)
    all = b"x" * (1 << 30)
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} is dead (SIGKILL, ", "out-of-memory killer struck once", "{wait}"),
        kinds="NG",
        memory_bytes=900 << 20,
    ),
    "other sizes": End(
        body="""
dist.all_reduce(ones(9 if rank == culprit else 8))  # WAIT
""",
        says=("different operations", "rank {c} called all_reduce(float32[9], SUM) at {WAIT}"),
    ),
    "a receive from one that has ended": End(
        body="""
if rank == 1 - culprit:
    dist.recv(ones(), src=culprit, tag=7)  # WAIT
    time.sleep(5)
os._exit(0)  # gloo's threads may abort an interpreter that ends
""",
        says=("rank {c} has ended (code 0)", "{others} waits for it in recv, tag 7"),
        kinds="G",
        ranks=2,
    ),
    "a data loader's process is killed": End(
        body="""
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        if rank == culprit:
            os.kill(os.getpid(), signal.SIGKILL)
        return ones()
for batch in torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=2):
    dist.all_reduce(batch)  # WAIT
time.sleep(5)
""",
        says=("rank {c}'s data loader worker", "was killed by SIGKILL"),
        kinds="G",
        ranks=2,
    ),
    "a full disk": End(
        body="""
if rank == culprit:
    data = ones(1 << 20)
    data.tofile(FULL + "/data") if hasattr(data, "tofile") else torch.save(data, FULL + "/data")
dist.all_reduce(ones())  # WAIT
""",
        says=("rank {c} has ended (code 1: No space left on device: {full} is full)",),
        kinds="NG",
    ),
}


@pytest.fixture
def full(tmp_path: Path) -> Iterator[str]:
    """A directory without room."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    (place / "filler").write_bytes(bytes(1 << 19))
    yield str(place)
    subprocess.run(["umount", "--lazy", place], check=True)


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[list[str]]:
    """A control group with that limit, if any: what to put before a command to run it there."""
    if not limit_bytes:
        yield []
        return
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


@pytest.mark.parametrize(("title", "kind", "culprit"), params(ENDS))
def test_after_the_end(launch: Launch, full: str, title: str, kind: str, culprit: int) -> None:
    end = ENDS[title]
    begin = f"{BEGIN[kind]}FULL = {full!r}\n"
    script = Path(launch.script(begin + COMMON + end.body))
    words = ["--nproc-per-node", str(end.ranks), str(script), str(culprit)]
    with memory_limit(end.memory_bytes) as before:
        process = launch.start(*words, before=before)
        assert process.wait(60) == 1
    done = explain(str(process.pid))
    others = name([rank for rank in range(end.ranks) if rank != culprit])
    known = {**places(script), "c": culprit, "others": others, "full": full}
    known["wait"] = f"{others} wait"
    # Gloo's survivors raise before anybody can ask where they are, or read what all of them are in.
    says = [part for part in end.says if kind == "N" or part != "{wait}"]
    parts = tuple(part.format(**known) for part in says)
    assert in_order(parts, done.stdout), f"{done.stdout!r} does not say {parts}"
    assert done.returncode == 3
    assert "with exit status 1" in done.stdout


SLEEPS = """
if rank == culprit:
    time.sleep(600)  # HERE
dist.all_reduce(ones())  # WAIT
"""


@pytest.mark.parametrize(
    ("kind", "how", "parts", "status"),
    [
        ("N", "-S", ("rank 1 ", "in time.sleep: cannot tell at which line"), 4),
        pytest.param(
            "G",
            "-S",
            ("cannot tell whether the job hangs", "rallypoint is not installed for them"),
            4,
            marks=pytest.mark.needs_torch,
        ),
        pytest.param(
            "G",
            "FR off",
            ("rank 1 ", "sleep at {HERE}", "operation numbers unknown", "{others} probably wait"),
            3,
            marks=pytest.mark.needs_torch,
        ),
    ],
)
def test_with_less_evidence(
    launch: Launch, kind: str, how: str, parts: tuple[str, ...], status: int
) -> None:
    """Workers whose Python does not begin with this package (-S); without PyTorch's recorder."""
    path = f"import sys\nsys.path += {[each for each in sys.path if each]!r}\n"
    text = path + BEGIN[kind] + COMMON + SLEEPS
    script = Path(launch.script(text))
    environ = {"TORCH_FR_BUFFER_SIZE": "0"} if how == "FR off" else {}
    program = [str(script), "1"]
    if how == "-S":
        program = ["--no-python", sys.executable, "-S", *program]
    process = launch.start("--nproc-per-node", "3", *program, environ=environ)
    launch.wait_for("ready.*", 3)
    time.sleep(ENOUGH_S)
    done = explain(str(process.pid))
    known = {**places(script), "others": "ranks 0, 2"}
    assert in_order(tuple(part.format(**known) for part in parts), done.stdout), done.stdout
    assert done.returncode == status
    process.kill()


def test_nothing_is_kept_of_a_job_that_succeeded(launch: Launch) -> None:
    process = launch.start(launch.script("pass"))
    assert process.wait(30) == 0
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


@pytest.mark.parametrize("kind", ["N", pytest.param("G", marks=pytest.mark.needs_torch)])
def test_healthy_jobs_are_not_said_to_hang(launch: Launch, kind: str) -> None:
    asked = int(os.environ.get("RALLYPOINT_TEST_HEALTHY", "8"))
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    script = launch.script(BEGIN[kind] + COMMON + "seen = []\n" + HEALTHY)
    process = launch.start("--nproc-per-node", "3", script, str(seed))
    launch.wait_for("ready.*", 3)
    for _ in range(asked):
        time.sleep(chance.random())
        done = explain(str(process.pid), "--why")
        assert done.returncode == 0, done.stdout
        assert done.stdout.startswith("no hang")
    assert process.poll() is None, launch.err
    process.kill()
