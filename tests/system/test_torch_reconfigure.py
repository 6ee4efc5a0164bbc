"""torch.distributed's reconfigure on our group, as PyTorch's own suite tests it on gloo's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.store.server import StoreServer

pytestmark = [pytest.mark.system, pytest.mark.needs_torch, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("torch_reconfigure.py")


def run() -> tuple[list[int], list[str]]:
    """Exit statuses and outputs of three ranks, which meet at a store of this process."""
    with StoreServer() as server:
        given = {
            **os.environ,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)},
            **{"OMP_NUM_THREADS": "1"},
        }
        members = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT)],
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
    statuses, printed = run()
    assert statuses == [0, 0, 0]
    assert all(each.endswith("done\n") for each in printed)


def test_the_cases_with_a_killed_member(seed: int) -> None:
    """Any of the three, also the one at whose store all had met."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.system.torch_reconfigure_kills", str(seed)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout, done.stderr[-10_000:])
    assert done.returncode == 0
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 14
    for each in told:
        wanted = [-signal.SIGKILL if rank == each["victim"] else 0 for rank in range(3)]
        assert each["statuses"] == wanted, each
