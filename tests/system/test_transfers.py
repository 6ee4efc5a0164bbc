"""Newcomers get the others' state, bit for bit, by each way, and never half of one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.conftest import Launch

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
PROGRAM = str(Path(__file__).with_name("transfers.py"))
RANKS = 4


def ways(directory: Path) -> set[str]:
    return {way for rank in range(RANKS) for way in (directory / str(rank)).read_text().split()}


@pytest.mark.exact
@pytest.mark.parametrize(
    ("direct", "expected"),
    [
        pytest.param("", {"read"}, id="read"),
        pytest.param("0", {"broadcast", "messages"}, id="messages", marks=pytest.mark.everyday),
    ],
)
def test_on_one_host(launch: Launch, seed: int, direct: str, expected: set[str]) -> None:
    words = ("--nproc-per-node", str(RANKS), PROGRAM, str(launch.directory), str(seed))
    launch.start(*words, environ={"RALLYPOINT_DIRECT": direct})
    assert launch.process is not None
    assert launch.process.wait(120) == 0, launch.err
    assert ways(launch.directory) == expected


@pytest.mark.exact
def test_on_two_hosts(needs_hosts: None, tmp_path: Path, seed: int) -> None:
    """From the own host if there is a source, otherwise from all of them."""
    with Hosts(2) as hosts:
        agents = []
        for rank, host in enumerate(hosts.hosts):
            words = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "host1"]
            words += ["--node-rank", str(rank), PROGRAM, str(tmp_path), str(seed)]
            command = [sys.executable, "-m", "rallypoint", "run", *words]
            agents.append(host.popen(command, env=dict(os.environ), cwd=tmp_path))
        assert [agent.wait(120) for agent in agents] == [0, 0]
    assert ways(tmp_path) == {"read", "messages"}


# Ranks 0 and 1 have the state, rank 2 reads it in rank 0. While it does, one of them dies.
DIES = """
import os, signal, sys, time
from pathlib import Path
import numpy as np, rallypoint as dist
from rallypoint.elastic import transfer
from rallypoint.elastic.agreement import Settlement
from rallypoint.process_group.groups.default import resolve

def copy_late(*arguments):
    time.sleep(0.2)
    os.kill(pids[victim], signal.SIGKILL)
    while victim == 1 and not os.path.exists("changed"):
        time.sleep(0.01)
    copy(*arguments)
    return True

signal.signal(signal.SIGTERM, signal.SIG_IGN)
victim = int(sys.argv[1])
dist.init_process_group()
rank = dist.get_rank()
pids = [None] * 3
dist.all_gather_object(pids, os.getpid())
copy, transfer._copy = transfer._copy, copy_late
array = np.full(1_000_000, 0.0 if rank == 2 else 1.0)
try:
    transfer.synchronize({"array": array}, Settlement(1, (0, 1), (2,)), resolve(None))
    told = "returned"
except dist.PeerLostError as error:
    told = f"lost {error.rank}"
array[:] = 2.0
if rank == 0:
    Path("changed").touch()
Path(f"told.{rank}").write_text(told)
"""


@pytest.mark.parametrize("victim", [0, 1], ids=["the source", "another"])
def test_what_is_not_confirmed_is_no_state(launch: Launch, victim: int) -> None:
    words = ("--nproc-per-node", "3", "--shutdown-timeout", "20", launch.script(DIES), str(victim))
    launch.start(*words)
    assert launch.process is not None
    assert launch.process.wait(60) == 1
    told = {rank: launch.directory / f"told.{rank}" for rank in range(3) if rank != victim}
    assert {path.read_text() for path in told.values()} == {f"lost {victim}"}
    launch.expect_nothing_left()
