"""The switch that makes PyTorch's gloo mean our engine, in real jobs."""

from __future__ import annotations

import pytest
from tests.system.conftest import Launch

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(300)]

SCRIPT = """
import torch, torch.distributed as dist

def form(name):
    dist.init_process_group(name) if name else dist.init_process_group()
    assert dist.group.WORLD.name() == "rallypoint", name
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == 2

for name in (None, "cpu:gloo,cuda:nccl", "gloo"):
    if dist.is_initialized():
        dist.destroy_process_group()
    form(name)
    if name:
        assert dist.get_backend() == name, dist.get_backend()
assert dist.get_backend() is dist.Backend.GLOO
assert dist.get_backend_config().startswith("cpu:gloo")
dist.monitored_barrier()
own = dist.new_group([0, 1], backend="gloo")
alone = dist.new_group([1], backend="gloo")
assert dist.get_backend(own) == "gloo" and own.name() == "rallypoint"
x = torch.ones(1)
dist.all_reduce(x, group=own)
assert x == 2
if dist.get_rank() == 1:
    assert dist.get_backend(alone) == "gloo" and alone.name() == "rallypoint"
"""
BESIDE = """
import pathlib, torch, torch.distributed as dist
dist.init_process_group("gloo")
torchs = dist.new_group([0, 1], backend="torch_gloo")
assert isinstance(torchs._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
for group in (None, torchs):
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x == 2
# Gloo's threads may still hold tensors: one that lets go while the interpreter ends aborts the
# process (pytorch/pytorch#190489). With their group they end now.
del group, torchs
dist.destroy_process_group()
threads = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
assert "pt_gloo_runloop\\n" not in threads, threads
"""
TOLD = "rallypoint: RALLYPOINT_AS_GLOO=1: process groups of gloo run on Rallypoint's engine\n"


@pytest.mark.everyday
def test_all_ways_to_a_group_of_gloo_lead_to_ours(launch: Launch) -> None:
    job = launch.start("--as-gloo", "--nproc-per-node", "2", launch.script(SCRIPT))
    assert job.wait(200) == 0, launch.err
    assert launch.err.count(TOLD) == 1


def test_torchs_own_gloo_has_another_name(launch: Launch) -> None:
    assert launch.run("--as-gloo", "--nproc-per-node", "2", launch.script(BESIDE)) == 0, launch.err


def test_works_under_torchrun(launch: Launch) -> None:
    words = ("--standalone", "--nproc-per-node", "2", launch.script(SCRIPT))
    environ = {"RALLYPOINT_AS_GLOO": "1"}
    job = launch.start(*words, environ=environ, launcher=("-m", "torch.distributed.run"))
    assert job.wait(200) == 0, launch.err
    assert launch.err.count(TOLD) == 1


@pytest.mark.everyday(writer="the launcher")
def test_is_refused_where_pytorch_would_not_load_it(launch: Launch) -> None:
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert launch.run("--as-gloo", "script.py", environ=environ) == 2
    assert launch.err == (
        "rallypoint run: --as-gloo needs PyTorch to load its installed backends, which"
        " TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns off; unset that variable.\n"
    )
