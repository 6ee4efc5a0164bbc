"""torch.distributed's reconfigure on our group, as PyTorch's own suite tests it on gloo's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.store.server import StoreServer

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("torch_reconfigure.py")


def run(*words: str) -> tuple[list[int], list[str]]:
    """Exit statuses and outputs of three ranks, which meet at a store of this process."""
    with StoreServer() as server:
        given = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)},
            **{"OMP_NUM_THREADS": "1"},
        }
        members = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *words],
                env={**given, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        try:
            printed = [each.communicate(timeout=200)[0] for each in members]
        finally:
            for each in members:
                each.kill()
                each.wait()
    return [each.returncode for each in members], printed


@pytest.fixture(autouse=True)
def needs_reconfigure() -> None:
    dist = pytest.importorskip("torch.distributed")
    if not hasattr(dist, "_reconfigure"):
        pytest.skip("PyTorch before 2.14: no reconfigure")


def test_the_suites_cases() -> None:
    statuses, printed = run("all")
    assert statuses == [0, 0, 0]
    assert all(each.endswith("done\n") for each in printed)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_member(victim: int) -> None:
    """Also the one at whose store all had met."""
    statuses, _ = run("killed", str(victim))
    assert statuses == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)]
