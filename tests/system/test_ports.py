"""A firewall that opens what docs/ports.md lists, and no more, is not noticed by a job."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.nodes import Agents

pytestmark = pytest.mark.system

WORKERS = 2
RANGE = f"21000-{21000 + WORKERS + 4 - 1}"  # "the number of workers of a machine plus four"
FORM_A_GROUP = """
import numpy as np, rallypoint as dist
dist.init_process_group()
x = np.ones(100_000)
dist.all_reduce(x)
assert x[0] == dist.get_world_size(), x
pair = dist.new_group([0, dist.get_world_size() - 1])
dist.barrier()
"""
# Only what begins a connection is looked at: answers may go to any port.
FIREWALL = """
add table inet firewall
add chain inet firewall input {{ type filter hook input priority 0; }}
add rule inet firewall input iif lo accept
add rule inet firewall input tcp flags syn / syn,ack tcp dport != {{ {ports} }} counter drop
"""


@pytest.fixture
def agents(needs_hosts: None, tmp_path: Path) -> Iterator[Agents]:
    with Hosts(2) as hosts, Agents(hosts, tmp_path) as agents:
        (tmp_path / "worker.py").write_text(FORM_A_GROUP + (tmp_path / "worker.py").read_text())
        yield agents


def dropped(agents: Agents, number: int) -> int:
    """How many connections the firewall of a host has turned away."""
    rules = agents.hosts[number].run("nft", "list", "table", "inet", "firewall")
    (count,) = re.findall(r"packets (\d+)", rules)
    return int(count)


@pytest.mark.parametrize(
    ("flags", "fixed"),
    [
        (("--rdzv-backend", "static", "--rdzv-endpoint", "", "--master-addr", "host1"), 29500),
        (("--rdzv-conf", "last_call_timeout=0.5"), 29400),
    ],
    ids=["static", "c10d"],
)
def test_the_fixed_port_and_a_range_are_enough(
    agents: Agents, flags: tuple[str, ...], fixed: int
) -> None:
    for host in agents.hosts.hosts:
        for line in FIREWALL.format(ports=f"{fixed}, {RANGE}").strip().splitlines():
            host.run("nft", line)
    for number in (1, 2):
        rank = ("--node-rank", str(number - 1)) if "static" in flags else ()
        words = ("--nnodes", "2", "--port-range", RANGE, "--max-restarts", "1", *flags, *rank)
        agents.start(number, *words, workers=WORKERS)
    for round_number in (0, 1):
        seats = {
            f"host{1 + rank // 2}.{rank % 2}": f"{round_number} {rank}/4 {rank // 2}/2"
            for rank in range(4)
        }
        agents.wait_for(seats)
        if round_number == 0:
            agents.kill_worker(2)
    assert [dropped(agents, number) for number in (1, 2)] == [0, 0]
    # The firewall is one.
    knock = "import socket; socket.create_connection(('10.77.0.1', 20999), 0.3)"
    agents.hosts[2].run("sh", "-c", f'! python3 -c "{knock}" 2>/dev/null')
    assert dropped(agents, 1) > 0
    agents.finish((1, 2))
