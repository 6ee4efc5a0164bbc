"""PyTorch finds the backend by itself, and pays and breaks nothing where it does not want it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.system.conftest import Launch

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]


def python(text: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


ALONE = """
import torch
import torch.distributed as dist
dist.init_process_group("rallypoint", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "rallypoint"
x = torch.ones(2)
dist.all_reduce(x)
assert x.tolist() == [1, 1]
dist.destroy_process_group()
"""


@pytest.mark.everyday
def test_needs_no_import_by_the_user() -> None:
    done = python(ALONE)
    assert (done.returncode, done.stderr) == (0, "")


def test_import_of_rallypoint_first_is_as_good() -> None:
    done = python("import rallypoint, rallypoint.pytorch\n" + ALONE)
    assert (done.returncode, done.stderr) == (0, "")


def test_register_by_hand_where_autoload_is_off() -> None:
    from rallypoint.pytorch.versions import HAS_BACKENDS

    done = python(ALONE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    # From 2.14 on PyTorch loads backends that are asked for by name.
    assert (done.returncode == 0) == HAS_BACKENDS, done.stderr
    by_hand = "import rallypoint.pytorch\nrallypoint.pytorch.register()\n" + ALONE
    for autoload in "01":
        done = python(by_hand, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
        assert (done.returncode, done.stderr) == (0, "")


def test_import_of_torch_loads_nothing_heavy_of_ours() -> None:
    done = python(
        "import sys, torch\n"
        "ours = {name for name in sys.modules if name.startswith('rallypoint')}\n"
        "light = {'', '.base', '.base.public_names', '.pytorch', '.pytorch.autoload'}\n"
        "assert {name.removeprefix('rallypoint') for name in ours} <= light, ours"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.everyday
def test_whatever_is_wrong_with_us_import_torch_works() -> None:
    done = python(
        "import torch.distributed as dist\n"  # the hook has run; now as on a broken installation
        "from rallypoint.pytorch import autoload\n"
        "def broken(*_, **__): raise OSError('broken')\n"
        "del dist.Backend.RALLYPOINT\n"
        "dist.Backend.register_backend = broken\n"
        "autoload.autoload()\n"
    )
    assert done.returncode == 0
    assert done.stderr == (
        "rallypoint: PyTorch's backend 'rallypoint' is not available: OSError: broken\n"
    )


def test_gloo_stays_the_default_and_both_work_side_by_side(launch: Launch) -> None:
    script = launch.script("""
import torch, torch.distributed as dist
dist.init_process_group("rallypoint")
gloo = dist.new_group(backend="gloo")
for group in (None, gloo):
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert float(x) == 2
dist.destroy_process_group()
dist.init_process_group("cpu:rallypoint,cuda:gloo")  # as with nccl, where that is
x = torch.ones(1)
dist.all_reduce(x)
assert float(x) == 2 and dist.group.WORLD.name() == "rallypoint"
dist.destroy_process_group()
dist.init_process_group()  # gloo's first time at this store: a second may read old addresses
assert "rallypoint" not in dist.get_backend(), dist.get_backend()
ours = dist.new_group(backend="rallypoint")
for group in (None, ours):
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert float(x) == 2
dist.destroy_process_group()
""")
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err


def test_a_group_of_ours_can_be_formed_again_at_a_store_that_stays(launch: Launch) -> None:
    """torchrun keeps its store across restarts: nothing of the killed round is read."""
    script = launch.script("""
import os, signal, torch, torch.distributed as dist
for _ in range(2):
    dist.init_process_group("rallypoint")
    x = torch.ones(1)
    dist.all_reduce(x)
    assert float(x) == 2
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    dist.destroy_process_group()
open(f"done.{os.environ['RANK']}", "w").close()
""")
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", script)
    assert launch.run(*words, launcher=("-m", "torch.distributed.run")) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 2


@pytest.mark.everyday
def test_ddp_trains_as_one_process_does(launch: Launch) -> None:
    script = launch.script("""
import copy, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("rallypoint")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
alone = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
data = torch.randn(20, ranks, 4, 8)

def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

ours = DistributedDataParallel(copy.deepcopy(alone))
train(ours, data[:, rank])
losses = train(alone, data.flatten(1, 2))
assert losses[-1] < losses[0] / 2, losses
for found, expected in zip(ours.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found, expected)
open(f"trained.{rank}", "w").close()
""")
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert len(list(launch.directory.glob("trained.*"))) == 2


@pytest.mark.everyday
def test_mismatch_names_the_users_lines(launch: Launch) -> None:
    script = launch.script("""
import torch, torch.distributed as dist
dist.init_process_group("rallypoint")
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(2))
else:
    dist.all_reduce(torch.ones(3))
""")
    assert launch.run("--nproc-per-node", "2", script) != 0
    assert "all_reduce(float32[2], SUM) at worker.py:5" in launch.err, launch.err
    assert "all_reduce(float32[3], SUM) at worker.py:7" in launch.err


def test_mismatch_names_the_users_lines_behind_torchs_own(launch: Launch) -> None:
    script = launch.script("""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("rallypoint")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
loss = model(torch.ones(2, 4)).sum()
if dist.get_rank() == 0:
    loss.backward()
else:
    dist._functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD).tolist()
""")
    assert launch.run("--nproc-per-node", "2", script) != 0
    assert "all_reduce(float32[20], SUM) at worker.py:8" in launch.err, launch.err
    assert "all_reduce(float32[3], SUM) at worker.py:10" in launch.err


@pytest.mark.exact
def test_own_hook_averages_in_any_dtype_and_group(launch: Launch) -> None:
    script = launch.script("""
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from rallypoint.pytorch import ddp_comm_hook
dist.init_process_group("rallypoint")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1]), dist.new_group([2])]
def gradient(group, hook):
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=group)
    if hook:
        model.register_comm_hook(*hook)
    model(torch.full((2, 64), 1.0 + rank)).square().sum().backward()
    return model.module.weight.grad
for group in (None, pairs[rank == 2]):
    exact = gradient(group, None)
    for state in (None, torch.bfloat16, torch.float16):
        given = (group, state) if group else state
        found = gradient(group, (given, ddp_comm_hook))
        close = {None: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[state]  # rounded twice
        torch.testing.assert_close(found, exact, rtol=close, atol=1e-4)
        assert found.equal(found.to(state or torch.float32).float())
dist.destroy_process_group()
""")
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err


def test_a_forked_child_leaves_its_parents_groups_alone(launch: Launch) -> None:
    """However it ends, and although none of the parent's threads are there."""
    script = launch.script("""
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("rallypoint")
other = 1 - dist.get_rank()
values = [torch.zeros(2), torch.zeros(2)]
received = dist.irecv(values[0], other)  # a thread sees to it
told = received.get_future()  # and another one to what follows
for use in (False, True):
    child = os.fork()
    if child == 0:
        if use:
            try:
                dist.all_reduce(torch.ones(1))
            except ValueError as error:
                assert "belongs to the process that forked this one" in str(error), error
                dist.destroy_process_group()
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
dist.all_reduce(values[1])
dist.send(values[1] + other, other)
told.wait()
assert values[0].tolist() == [1.0 - other] * 2
dist.destroy_process_group()
""")
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err


def test_threads_that_wait_do_not_spoil_the_end(launch: Launch) -> None:
    """In PyTorch's code, Python's end would abort the process."""
    script = launch.script("""
import atexit, os, sys, threading, time, torch, torch.distributed as dist
def is_in_call(frame):
    names = []
    while frame is not None:
        names.append(frame.f_globals["__name__"])
        frame = frame.f_back
    return any(name.startswith("torch.distributed") for name in names)
def tell_calls():
    os.write(1, b"%d\\n" % sum(map(is_in_call, sys._current_frames().values())))
atexit.register(tell_calls)
dist.init_process_group("rallypoint")
if dist.get_rank() == 0:
    for _ in range(16):
        group = dist.new_group([0, 1])
        wait = lambda group=group: dist.all_reduce(torch.ones(1), group=group)
        threading.Thread(target=wait, daemon=True).start()
else:
    [dist.new_group([0, 1]) for _ in range(16)]
time.sleep(0.3)
""")
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert launch.out == "0\n0\n"


def test_a_callback_that_runs_at_the_end_is_let_finish(launch: Launch) -> None:
    script = launch.script("""
import time, torch, torch.distributed as dist
dist.init_process_group("rallypoint")
if dist.get_rank() == 0:
    def follow(future):
        until = time.monotonic() + 4
        while time.monotonic() < until:
            time.sleep(0.001)
        print("finished")
    dist.irecv(torch.zeros(1), 1).get_future().then(follow)
    dist.recv(torch.zeros(1), 1, tag=1)
else:
    dist.send(torch.ones(1), 0)
    time.sleep(0.2)
    dist.send(torch.ones(1), 0, tag=1)
""")
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert launch.out == "finished\n"
