"""A forked child has nothing of its parent's groups, and may form groups of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.hosts import Hosts
from tests.system.test_tcp import BEGIN, Job

pytestmark = pytest.mark.system

# What a child may have open: the three standard streams, files, and nothing that others wait for.
OPEN = """
def opened():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            pass  # that of the list itself
    return [each for each in found if each.startswith(("socket:", "pipe:", "anon_inode:"))]
"""


@pytest.fixture
def two(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


LOADER = """
import os, sys, time
import torch, torch.distributed as dist
from datetime import timedelta
import rallypoint
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, _utils

# The loader's workers outlive their parent by so long that only who sees past them is told soon.
_utils.worker.MP_STATUS_CHECK_INTERVAL = 30

def tell(text):
    with open(f"told.{os.environ['RANK']}.part", "w") as file: file.write(str(text))
    os.rename(f"told.{os.environ['RANK']}.part", f"told.{os.environ['RANK']}")

dist.init_process_group("rallypoint", timeout=timedelta(seconds=60))
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 2))
data = TensorDataset(torch.randn(100_000, 8), torch.randn(100_000, 2))
loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
try:
    for step, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if step == 3:
            tell("ready")
except RuntimeError as error:
    tell(f"{error} at {time.time()}")
    os._exit(0)
"""


@pytest.mark.needs_torch
@pytest.mark.repeated
def test_a_rank_killed_beside_its_data_loaders_workers_is_told_at_once(
    two: Hosts, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    job = Job(two, (1, 2), LOADER, tmp_path)
    try:
        assert [job.told(rank) for rank in (0, 1)] == ["ready"] * 2
        os.kill(job.pid(1), signal.SIGKILL)
        killed = time.time()
        text, _, when = job.told(0).rpartition(" at ")
        assert "rank 1" in text, text
        assert "ended" in text, text
        record_property("told after", float(when) - killed)
        assert float(when) - killed < SOON_S
    finally:
        job.kill()


PLAIN = """
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    children.append(child)
started = subprocess.Popen(["sleep", "60"], close_fds=False)
tell("ready")
values = np.ones(10)
try:
    while True:
        dist.all_reduce(values)
except dist.PeerLostError as error:
    tell(f"{error.rank} {time.time()}")
for child in [*children, started.pid]:
    os.kill(child, 9)
"""


@pytest.mark.repeated
def test_nor_do_children_of_any_other_kind_hide_their_parents_death(
    two: Hosts, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Forked ones, and those that were started without closing what they inherit."""
    job = Job(two, (1, 2), "import subprocess\n" + BEGIN + PLAIN, tmp_path)
    try:
        assert [job.told(rank) for rank in (0, 1)] == ["ready"] * 2
        os.kill(job.pid(1), signal.SIGKILL)
        killed = time.time()
        lost, when = job.told(0).split()
        assert lost == "1", job.output()
        record_property("told after", float(when) - killed)
        assert float(when) - killed < SOON_S
    finally:
        job.kill()


ALONE = {
    **os.environ,
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
}


def run_ranks(script: str, directory: Path, ranks: int = 2, patience_s: float = 200) -> list[str]:
    """Run it as so many ranks of this host without a launcher; what each has printed."""
    path = directory / "worker.py"
    path.write_text(script)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(path)],
            env={**ALONE, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=patience_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
    return outputs


BEGIN_HERE = """
import os, sys, time, traceback, numpy as np, rallypoint as dist
from datetime import timedelta
dist.init_process_group(os.environ.get("BACKEND", "tcp"), timeout=timedelta(seconds=120))
rank, ranks = dist.get_rank(), dist.get_world_size()

def forked(work):
    "Have a child do it; end with an error if it does."
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child
def ended(child):
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.everyday
def test_a_child_keeps_nothing_that_others_wait_for(tmp_path: Path) -> None:
    script = (
        BEGIN_HERE
        + OPEN
        + """
before = set(opened())
work = dist.irecv(np.ones(1), 1 - rank)  # starts the threads, too
def look():
    # A pipe for output is what the test itself hands on.
    left = [each for each in opened() if each not in outputs]
    assert not left, left
    assert len(os.listdir("/proc/self/task")) == 1
    # Who is who is still known: samplers ask for it in data loaders' workers.
    assert (dist.get_rank(), dist.get_world_size()) == (rank, ranks)
outputs = {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)}
assert len(before - outputs) >= 5, before
for _ in range(3):
    ended(forked(look))
dist.send(np.ones(1), 1 - rank)
work.wait()
values = np.ones(1)
dist.all_reduce(values)
assert values[0] == ranks
dist.destroy_process_group()
"""
    )
    run_ranks(script, tmp_path)


@pytest.mark.parametrize("backend", ["shm", pytest.param("tcp", marks=pytest.mark.everyday)])
def test_a_child_forms_groups_of_its_own(tmp_path: Path, free_port: int, backend: str) -> None:
    """With each other, beside their parents' group, which is in use and is not slowed down."""
    script = (
        BEGIN_HERE
        + f"""
work = dist.irecv(np.ones(1), 1 - rank)  # under way in the background meanwhile
def form():
    address = "tcp://127.0.0.1:{free_port}"
    dist.init_process_group("{backend}", address, rank=rank, world_size=ranks)
    for count in (1, 100_000):
        values = np.full(count, rank + 1.0)
        works = [dist.all_reduce(values, async_op=True) for _ in range(3)]
        for each in works:
            each.wait()
        assert (values == 12).all(), values
    if rank == 0:
        time.sleep(1)  # the other child's thread has to carry it out
        dist.send(np.ones(100_000), 1)
    else:
        received = np.zeros(100_000)
        waiting = dist.irecv(received, 0)
        while not (received == 1).all():
            time.sleep(0.01)
        waiting.wait()
    group = dist.new_group([0, 1])
    dist.barrier(group=group)
    dist.destroy_process_group()
child = forked(form)
began, used = time.monotonic(), time.process_time()
ended(child)
share = (time.process_time() - used) / (time.monotonic() - began)
assert share < 0.3, share
dist.send(np.ones(1), 1 - rank)
work.wait()
dist.barrier()
dist.destroy_process_group()
"""
    )
    run_ranks(script, tmp_path)


@pytest.mark.parametrize("backend", ["tcp", "shm"])
def test_what_a_child_inherits_is_refused_at_once(tmp_path: Path, backend: str) -> None:
    script = (
        BEGIN_HERE.replace('"tcp"', f'"{backend}"')
        + """
received, values = np.zeros(100_000), np.ones(100_000)
works = [dist.irecv(received, 1 - rank), dist.all_reduce(values, async_op=True)]
if rank == 1:
    works[1].wait()
group = dist.new_group([0, 1])
def use():
    began = time.monotonic()
    for work in works[:1]:
        for use in (work.wait, work.is_completed, work.exception):
            try:
                use()
            except ValueError as error:
                assert "belongs to the process that forked this one" in str(error), error
            else:
                raise AssertionError(use)
    for use in (lambda: dist.all_reduce(np.ones(1)), lambda: dist.barrier(group=group)):
        try:
            use()
        except ValueError as error:
            assert "belongs to the process that forked this one" in str(error), error
    assert time.monotonic() - began < 60
    dist.destroy_process_group()
for _ in range(2):
    ended(forked(use))
dist.barrier()  # whoever sends earlier completes what the other's children are to be refused
dist.send(np.ones(100_000), 1 - rank)
for work in works:
    work.wait()
assert (received == 1).all() and (values == 2).all()
dist.barrier(group=group)
dist.destroy_process_group()
"""
    )
    run_ranks(script, tmp_path)


def test_forks_at_any_time_of_a_busy_process(tmp_path: Path) -> None:
    """Whatever the parent's threads hold at that moment, the child can form a group."""
    script = (
        BEGIN_HERE
        + """
def form():
    dist.init_process_group("tcp", f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    dist.all_reduce(np.ones(10), async_op=True).wait()
    dist.destroy_process_group()
children = []
for step in range(20):
    works = [dist.all_reduce(np.ones(1 + step * 10_000), async_op=True) for _ in range(4)]
    works.append(dist.irecv(np.ones(50_000), 1 - rank))
    works.append(dist.isend(np.ones(50_000), 1 - rank))
    port = 29550 + 2 * step + rank
    children.append(forked(form))
    for work in works:
        work.wait()
    if step % 4 == 3:
        for child in children:
            ended(child)
        children = []
dist.destroy_process_group()
"""
    )
    run_ranks(script, tmp_path, patience_s=120)


FREED = """
import gc, socket, sys, weakref
gc.disable()
import torch, torch.distributed
import rallypoint
def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
def form_and_leave(dist):
    port = free_port()
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("rallypoint", init_method=where, rank=0, world_size=1)
    parts = [dist.new_group([0]) for _ in range(2)]
    for group in [None, *parts]:
        dist.all_reduce(torch.ones(4), group=group)
        dist.barrier(group=group)
        dist.all_gather_object([None], "one", group=group)
    refs = [weakref.ref(group) for group in [dist.group.WORLD, *parts]]
    dist.destroy_process_group(parts.pop())
    parts.clear()
    del group
    dist.destroy_process_group()
    assert [ref() for ref in refs] == [None] * 3
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
"""


@pytest.mark.needs_torch
@pytest.mark.parametrize("door", ["rallypoint", "torch.distributed"])
def test_a_group_that_was_left_is_freed_with_its_store(door: str) -> None:
    """By reference counts: the collector may come late, or never."""
    if door == "torch.distributed":
        pytest.importorskip("torch")
    program = f"{FREED}form_and_leave({door})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


NOTEBOOK = """
from accelerate import notebook_launcher
def train():
    torch.distributed.init_process_group("rallypoint")
    values = torch.ones(4)
    torch.distributed.all_reduce(values)
    assert bool((values == 2).all())
    torch.distributed.destroy_process_group()
form_and_leave(torch.distributed)
notebook_launcher(train, num_processes=2, use_port=str(free_port()))
"""


@pytest.mark.needs_torch
def test_a_notebook_launches_after_a_group_of_its_own() -> None:
    """accelerate's launcher forks; a store's thread that is left over would hang the children."""
    pytest.importorskip("accelerate")
    subprocess.run([sys.executable, "-c", FREED + NOTEBOOK], check=True, timeout=120)
