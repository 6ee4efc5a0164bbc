"""PyTorch's gloo process group forms through our server, by env:// and by store=."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rallypoint.store.server import StoreServer

WORLD_SIZE = 4

WORKER = """
import datetime, os, sys, torch, torch.distributed as dist
rank, world_size, port = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
if sys.argv[1] == "env":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
else:
    store = dist.TCPStore("127.0.0.1", port, None, False, datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
half = dist.new_group([0, 1])
tensor = torch.full((3,), float(rank))
dist.all_reduce(tensor)
assert tensor.tolist() == [6.0, 6.0, 6.0], tensor
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.needs_torch
@pytest.mark.parametrize("method", ["env", "store"])
def test_gloo_forms_through_our_server(method: str) -> None:
    with StoreServer(log_fd=-1) as server:
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, method],
                stderr=subprocess.PIPE,
                env=os.environ
                | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORLD_SIZE),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(server.port),
                    "TORCHELASTIC_USE_AGENT_STORE": "True",
                    "OMP_NUM_THREADS": "1",
                },
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
