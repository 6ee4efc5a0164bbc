"""PyTorch's gloo process group forms through our server, by env:// and by store=."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rallypoint.store.server import StoreServer

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]

WORLD_SIZE = 2
WORKER = """
import datetime, os, torch, torch.distributed as dist
rank, world_size, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
timeout = datetime.timedelta(seconds=60)

def check():
    pair = dist.new_group([0, 1])
    for group in (None, pair):
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [1.0, 1.0, 1.0], tensor
    dist.barrier()

dist.init_process_group("gloo", timeout=timeout)
check()
dist.destroy_process_group()
store = dist.PrefixStore("again", dist.TCPStore("127.0.0.1", port, None, False, timeout))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
check()
os._exit(0)  # else gloo's threads may abort the process (pytorch/pytorch#190489)
"""


@pytest.mark.everyday
def test_gloo_forms_through_our_server() -> None:
    with StoreServer(log_fd=-1) as server:
        given = {
            **os.environ,
            **{"WORLD_SIZE": str(WORLD_SIZE), "OMP_NUM_THREADS": "1"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)},
            **{"TORCHELASTIC_USE_AGENT_STORE": "True"},
        }
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER],
                stderr=subprocess.PIPE,
                env={**given, "RANK": str(rank)},
            )
            for rank in range(WORLD_SIZE)
        ]
        try:
            for worker in workers:
                _, errors = worker.communicate(timeout=100)
                assert worker.returncode == 0, errors.decode()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
