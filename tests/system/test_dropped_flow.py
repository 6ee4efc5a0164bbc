"""A job on several hosts whose network forgets connections: no node is lost for that."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Host, Hosts
from tests.system.nodes import Agents

from rallypoint.rendezvous.timeouts import Timeouts

pytestmark = pytest.mark.system

PORT, STORE_PORT = 29400, 29500
LEASE_S = Timeouts().silence_s
SIZE = ("--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=60")


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        yield agents


def flows_to(host: Host, address: str) -> set[tuple[int, int]]:
    """Its connections with that address, but for those with a workers' store, by their ports."""
    number = int.from_bytes(bytes(map(int, address.split("."))), "little")
    found = set()
    for line in host.run("cat", "/proc/net/tcp").splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        to, port = remote.split(":")
        if state == "01" and to == f"{number:08X}" and int(port, 16) != STORE_PORT:  # established
            found.add((int(local.partition(":")[2], 16), int(port, 16)))
    return found


def flow_with(host: Host, address: str, port: int) -> tuple[int, int]:
    """The only one with that port there."""
    (flow,) = [each for each in flows_to(host, address) if each[1] == port]
    return flow


def drop_flow(hosts: Hosts, ports: tuple[int, int]) -> None:
    """What goes between these ports, either way, and nothing else."""
    rules = [
        "add table bridge faults",
        "add chain bridge faults drops { type filter hook forward priority 0; }",
    ]
    for source, target in (ports, ports[::-1]):
        rules.append(f"add rule bridge faults drops tcp sport {source} tcp dport {target} drop")
    hosts.switch.run("nft", "\n".join(rules))


def test_a_member_whose_connection_is_forgotten_stays(agents: Agents) -> None:
    """New connections between the same hosts work: the agent makes one before its lease ends."""
    for number in (1, 2, 3):
        agents.start(number, "--verbose", *SIZE)
    expected = {f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)}
    agents.wait_for(expected)
    hosts = agents.hosts
    old = flow_with(hosts[2], hosts[1].address, PORT)
    drop_flow(hosts, old)
    end = time.monotonic() + 2 * LEASE_S + 1
    while time.monotonic() < end:
        assert agents.up() == expected, agents.story()
        time.sleep(0.05)
    assert "lost" not in agents.story()
    assert "silent" not in agents.story()
    assert flow_with(hosts[2], hosts[1].address, PORT) != old
    # An end is still news: it comes over the new connection.
    agents.send(2, signal.SIGKILL)
    agents.wait_for({"host1.0": "1 0/2 0/2", "host3.0": "1 1/2 1/2"})
    assert "node 1 (host2) was lost: its connection closed" in agents.said(1)
    agents.finish((1, 3))


STATIC = ("--nnodes", "2", "--rdzv-backend", "static", "--rdzv-endpoint", "")


def start_static(agents: Agents) -> dict[str, str]:
    for number in (1, 2):
        rank = ("--master-addr", "host1", "--node-rank", str(number - 1))
        agents.start(number, "--verbose", *STATIC, *rank)
    expected = {f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)}
    agents.wait_for(expected)
    return expected


@pytest.mark.seldom
def test_a_static_node_whose_connection_is_forgotten_stays(agents: Agents) -> None:
    """The same where nobody has a lease: only the connection's own end could tell of one."""
    expected = start_static(agents)
    hosts = agents.hosts
    (old,) = flows_to(hosts[2], hosts[1].address)
    drop_flow(hosts, old)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        assert agents.up() == expected, agents.story()
        assert agents.runs(1)
        assert agents.runs(2)
        time.sleep(0.05)
    (new,) = flows_to(hosts[2], hosts[1].address)
    assert new != old
    agents.send(2, signal.SIGKILL)
    assert agents.ended(1) == 1
    assert "node 1 (host2) was lost: its connection closed" in agents.said(1)


def test_a_pulled_cable_ends_a_static_job_on_both_sides(agents: Agents) -> None:
    start_static(agents)
    agents.hosts.pull_cable(2)
    assert agents.ended(1) == agents.ended(2) == 1
    assert "node 1 (host2) lost, 1 left, 2 needed" in agents.said(1)
    assert "node 0 at host1:29500 was lost: its launcher exited, or the network" in agents.said(2)
