"""What groups leave at the store that forms them: nothing, however many there have been."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.system.everyday import wait_until

from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer

pytestmark = pytest.mark.system

ROUNDS = 20
# One rank that forms so many groups of a kind, and ends.
RANK = """
import os, sys
from datetime import timedelta
kind, backend, rounds, wait = *sys.argv[1:3], int(sys.argv[3]), timedelta(seconds=60)
if kind == "torch":
    from rallypoint.pytorch import formation
    import torch.distributed as dist
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 3, False)
    for i in range(rounds):
        group = formation.form(
            dist.PrefixStore("g", store), rank=int(os.environ["RANK"]), size=3, timeout=wait,
            name="g", global_ranks=[],
        )
        group.world.destroy()
else:
    import rallypoint as dist
    dist.init_process_group(backend, timeout=wait)
    for i in range(rounds):
        if kind == "default":
            dist.destroy_process_group()
            dist.init_process_group(backend, timeout=wait)
        else:
            dist.destroy_process_group(dist.new_group())
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.exact
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        pytest.param("default", "shm", marks=pytest.mark.everyday),
        ("default", "tcp"),
        ("subgroup", "tcp"),
        pytest.param("torch", "", marks=pytest.mark.seldom),
    ],
)
def test_groups_leave_no_keys_behind(kind: str, backend: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    with StoreServer() as server, TCPStore("127.0.0.1", server.port) as look:
        given = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "WORLD_SIZE": "3"},
            **{"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"},
        }
        command = [sys.executable, "-c", RANK, kind, backend, str(ROUNDS)]
        ranks = [subprocess.Popen(command, env={**given, "RANK": str(rank)}) for rank in range(3)]
        assert [each.wait(120) for each in ranks] == [0, 0, 0]
        # A count of each rank's comings, say, but nothing for each group.
        wait_until(lambda: look.num_keys() < 8)
