"""Groups of so many hosts that connections are made when they are needed: here from two on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.hosts import Hosts
from tests.system.test_tcp import BEGIN, EVERYTHING, Job

from rallypoint.base.worker_env import SILENCE_S

pytestmark = pytest.mark.system

BLOCKED = """
add table inet block
add chain inet block input { type filter hook input priority 0; }
add rule inet block input tcp flags & (syn | ack) == syn {verdict}
"""
WAITS = """
tell(len(os.listdir("/proc/self/fd")))
try:
    if rank == 3: time.sleep(1000)
    dist.recv(np.zeros(1), 0 if rank else None)  # nobody talks to rank 3
except dist.PeerLostError as error:
    tell(f"{error.rank} {time.time()}")
"""
MEETS = """
dist.barrier()
for number in range(20):
    group = dist.new_group(list(range(ranks)))
    out, mine = np.zeros(1000), np.full(1000, float(rank + number))
    work = dist.isend(mine, 1 - rank, group=group)
    dist.recv(out, 1 - rank, group=group)
    assert (out == 1 - rank + number).all()
    work.wait()
tell("done")
dist.destroy_process_group()
"""
NEEDS = """
tell("ready")
while not os.path.exists("go"): time.sleep(0.01)
began = time.time()
try:
    if rank == 0: dist.send(np.ones(4), 3)
    elif rank == 3: dist.recv(np.ones(4), 0)
    else: dist.recv(np.ones(4))
except dist.PeerLostError as error:
    tell(f"{time.time() - began} {error.rank} {error}")
"""


@pytest.fixture(scope="module")
def module_hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture
def two(module_hosts: Hosts) -> Iterator[Hosts]:
    yield module_hosts
    for host in module_hosts.hosts:
        if "block" in host.run("nft", "list", "tables"):
            host.run("nft", "delete table inet block")


@pytest.fixture
def start(two: Hosts, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Starts a job of ranks on the hosts of a layout; what is left of it ends with the test."""
    jobs: list[Job] = []

    def begin(layout: Sequence[int], script: str, backend: str = "tcp") -> Job:
        environ = {"BACKEND": backend, "RALLYPOINT_EAGER_HOSTS": "1"}
        jobs.append(Job(two, layout, BEGIN + script, tmp_path, **environ))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.kill()


@pytest.mark.exact
def test_everything(start: Callable[..., Job]) -> None:
    """Some neighbours in the graph of control connections share a host."""
    job = start((1, 1, 2, 2), EVERYTHING, "rallypoint")
    assert [job.told(rank) for rank in range(4)] == ["done"] * 4
    job.end()


@pytest.mark.alone
def test_a_death_is_told_to_ranks_that_never_talked(start: Callable[..., Job]) -> None:
    """At once; rank 0 and rank 3 are no neighbours in the graph of control connections."""
    ranks = 16
    job = start((1, 2) * (ranks // 2), WAITS)
    opened = [int(job.told(rank)) for rank in range(ranks)]
    print(opened)
    # Seven neighbours have a connection each; fifteen ranks with three each would have 45 alone.
    assert max(opened) < 40, "there are more connections than to neighbours"
    os.kill(job.pid(3), signal.SIGKILL)
    killed = time.time()
    for rank in {*range(ranks)} - {3}:
        lost, when = job.told(rank).split()
        assert lost == "3", job.output()
        print(rank, float(when) - killed)
        assert float(when) - killed < SOON_S


@pytest.mark.exact
def test_both_sides_connect_at_once(start: Callable[..., Job]) -> None:
    job = start((1, 2), MEETS)
    assert [job.told(rank) for rank in (0, 1)] == ["done"] * 2
    job.end()


@pytest.mark.parametrize(
    ("verdict", "why", "most_s"),
    [
        ("reject with tcp reset", "Connection refused", SOON_S),
        ("drop", "Connection timed out", SILENCE_S + SOON_S),
    ],
)
def test_a_late_connection_that_is_blocked(
    two: Hosts, start: Callable[..., Job], tmp_path: Path, verdict: str, why: str, most_s: float
) -> None:
    """All ranks are told, by which of the two it could not be made, and where it should lead."""
    job = start((1, 1, 1, 2, 2, 2), NEEDS)
    assert [job.told(rank) for rank in range(6)] == ["ready"] * 6
    for host in two.hosts:
        host.run("nft", BLOCKED.replace("{verdict}", verdict))
    (tmp_path / "go").touch()
    for rank in range(6):
        took_s, lost, text = job.told(rank).split(maxsplit=2)
        assert float(took_s) < most_s, text
        pattern = rf"rank ([03]) cannot connect to rank ([03]) .* at 10\.77\.0\.\d:\d+ \({why}\)"
        found = re.match(pattern, text)
        assert found, text
        assert found[2] == lost
        assert found[1] != lost
