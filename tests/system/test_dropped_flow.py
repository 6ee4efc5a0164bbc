"""A job on several hosts whose network forgets connections: no node is lost for that."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.nodes import Agents

from rallypoint.rendezvous.timeouts import Timeouts
from rallypoint.testing.hosts import Host, Hosts

pytestmark = pytest.mark.system

PORT = 29400
LEASE_S = Timeouts().silence_s
SIZE = ("--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=0.5")


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        yield agents


def ports_to(host: Host, address: str) -> set[int]:
    """From which ports the host is connected to the endpoint's at that address: of its agent."""
    number = int.from_bytes(bytes(map(int, address.split("."))), "little")
    found = set()
    for line in host.run("cat", "/proc/net/tcp").splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state == "01" and remote == f"{number:08X}:{PORT:04X}":  # established
            found.add(int(local.partition(":")[2], 16))
    return found


def drop_flow(hosts: Hosts, port: int) -> None:
    """What goes between that port and the endpoint's, either way, and nothing else."""
    rules = [
        "add table bridge faults",
        "add chain bridge faults drops { type filter hook forward priority 0; }",
    ]
    for source, target in ((port, PORT), (PORT, port)):
        rules.append(f"add rule bridge faults drops tcp sport {source} tcp dport {target} drop")
    hosts.switch.run("nft", "\n".join(rules))


def test_a_member_whose_connection_is_forgotten_stays(agents: Agents) -> None:
    """New connections between the same hosts work: the agent makes one before its lease ends."""
    for number in (1, 2, 3):
        agents.start(number, "--verbose", *SIZE)
    expected = {f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)}
    agents.wait_for(expected)
    hosts = agents.hosts
    (old,) = ports_to(hosts[2], hosts[1].address)
    drop_flow(hosts, old)
    end = time.monotonic() + 2 * LEASE_S + 1
    while time.monotonic() < end:
        assert agents.up() == expected, agents.story()
        time.sleep(0.05)
    assert "lost" not in agents.story()
    assert "silent" not in agents.story()
    (new,) = ports_to(hosts[2], hosts[1].address)
    assert new != old
    # An end is still news: it comes over the new connection.
    agents.send(2, signal.SIGKILL)
    agents.wait_for({"host1.0": "1 0/2 0/2", "host3.0": "1 1/2 1/2"})
    assert "node 1 (host2) was lost: its connection closed" in agents.said(1)
    agents.finish((1, 3))
