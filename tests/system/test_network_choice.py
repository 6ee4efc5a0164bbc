"""Jobs on two hosts with two networks and a container bridge: which one carries what.

host1: eth0 10.77.0.1   eth1  10.88.0.1  docker0 172.17.0.1
host2: eth0 10.77.0.2   fast0 10.88.0.2  docker0 172.17.0.1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.nodes import Agents

pytestmark = pytest.mark.system

QUICK = ("--nnodes", "2", "--rdzv-conf", "last_call_timeout=0.5")
STATIC = ("--rdzv-backend", "static", "--rdzv-endpoint", "", "--master-addr", "host1")
# Says between which addresses the ranks are connected, by what the kernel knows.
WORKER = """
import numpy as np, os, socket, struct
import rallypoint as dist
dist.init_process_group()
total = np.ones(100_000)
dist.all_reduce(total)
assert (total == 2).all()
store = int(os.environ["MASTER_PORT"])
def plain(text):
    size = len(text) // 8
    packed = struct.pack(f"={size}I", *struct.unpack(f">{size}I", bytes.fromhex(text)))
    return socket.inet_ntop(socket.AF_INET if size == 1 else socket.AF_INET6, packed)
found = set()
mine = set()
for fd in os.listdir("/proc/self/fd"):
    try:
        mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        continue  # that of the list itself
for name in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(name).readlines()[1:]:
        words = line.split()
        (here, _), (there, port) = words[1].split(":"), words[2].split(":")
        if f"socket:[{words[9]}]" in mine and words[3] == "01" and int(port, 16) != store:
            found.add(plain(here).removeprefix("::ffff:"))
dist.barrier()
with open(f"used.{os.environ['RANK']}.part", "w") as file:
    file.write(" ".join([os.environ["MASTER_ADDR"], *sorted(found)]))
os.rename(f"used.{os.environ['RANK']}.part", f"used.{os.environ['RANK']}")
"""
FAILS = """
import rallypoint as dist
try:
    dist.init_process_group()
except dist.HostError as error:
    print("refused:", error, flush=True)
    raise
"""


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        hosts.switch.run("ip", "link", "add", "br1", "type", "bridge")
        hosts.switch.run("ip", "link", "set", "br1", "up")
        for host, name in zip(hosts.hosts, ("eth1", "fast0"), strict=True):
            port = f"wide{host.number}"
            pair = ["type", "veth", "peer", "name", name, "netns", str(host.pid)]
            hosts.switch.run("ip", "link", "add", port, *pair)
            hosts.switch.run("ip", "link", "set", port, "master", "br1", "up")
            host.run("ip", "addr", "add", f"10.88.0.{host.number}/24", "dev", name)
            host.run("ip", "link", "set", name, "up")
            host.run("ip", "addr", "add", f"fd88::{host.number}/64", "dev", name, "nodad")
            host.run("ip", "link", "add", "docker0", "type", "bridge")
            host.run("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
            host.run("ip", "link", "add", "c0", "type", "veth", "peer", "name", "c1")
            host.run("ip", "link", "set", "c1", "up")
            host.run("ip", "link", "set", "c0", "master", "docker0", "up")
            host.run("ip", "link", "set", "docker0", "up")
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        (tmp_path / "worker.py").write_text(WORKER + (tmp_path / "worker.py").read_text())
        yield agents


@dataclass(frozen=True)
class Case:
    """A job; what its launchers say, and which addresses its ranks use.

    In `flags` and `environ` of both hosts, {n} is the host's number.
    """

    said: str
    network: str
    flags: tuple[str, ...] = ()
    environ: dict[str, str] = field(default_factory=dict)
    environ_2: dict[str, str] = field(default_factory=dict)
    master: str = ""  # if the store is not on that network


CASES = {
    "the endpoint on the other network": Case(
        "network: {second}, 10.88.0.{n} (MTU 1500): *; passed over: eth0 (*",
        "10.88.0.",
        ("--rdzv-endpoint", "10.88.0.1:29400"),
    ),
    "IPv6": Case(
        "network: {second}, fd88::{n} (MTU 1500): *; passed over: eth0 (*",
        "fd88::",
        ("--rdzv-endpoint", "[fd88::1]:29400"),
    ),
    "interfaces by name, which differ": Case(
        "network: {second}, 10.88.0.{n} (MTU 1500): RALLYPOINT_SOCKET_IFNAME=* says so, though *"
        " eth0 (10.77.0.{n}, fd77::{n}); passed over: eth0 (*",
        "10.88.0.",
        environ={"RALLYPOINT_SOCKET_IFNAME": "=eth1"},
        environ_2={"RALLYPOINT_SOCKET_IFNAME": "^eth,lo,docker"},
    ),
    "static nodes": Case(
        "network: eth0, 10.77.0.{n} (MTU 1500): *; passed over: *",
        "10.77.0.",
        (*STATIC, "--node-rank", "{rank}"),
    ),
    "an address, which reaches the workers": Case(
        "network: {second}, 10.88.0.{n} (MTU 1500): --local-addr 10.88.0.{n} says so, though *",
        "10.88.0.",
        (*STATIC, "--node-rank", "{rank}", "--local-addr", "10.88.0.{n}"),
        master="host1",
    ),
}


EVERYDAY = ("the endpoint on the other network",)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[pytest.mark.everyday] * (name in EVERYDAY))
        for name, case in CASES.items()
    ],
)
def test_launcher_and_ranks_use_one_network(agents: Agents, case: Case) -> None:
    for number in (1, 2):
        known = {"n": number, "rank": number - 1}
        flags = [flag.format(**known) for flag in (*QUICK, *case.flags)]
        environ = case.environ_2 if number == 2 and case.environ_2 else case.environ
        agents.start(number, *flags, environ=environ)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
    agents.finish((1, 2))
    for number, second in ((1, "eth1"), (2, "fast0")):
        lines = [line for line in agents.said(number).splitlines() if "network: " in line]
        assert len(lines) == 1, agents.story()
        expected = f"rallypoint: {case.said.format(n=number, second=second)}*"
        assert fnmatchcase(lines[0], expected), agents.story()
        master, *used = (agents.directory / f"used.{number - 1}").read_text().split()
        assert used == [f"{case.network}{number}"], agents.story()
        assert master in (case.master, f"{case.network}1", f"{case.network}2", "host1")


def test_hosts_that_have_ipv6_only(agents: Agents) -> None:
    for host in agents.hosts.hosts:
        host.run("ip", "-4", "addr", "flush", "dev", "eth0")
    try:
        for number in (1, 2):
            flags = (*QUICK, "--rdzv-endpoint", "[fd77::1]:29400")
            agents.start(number, *flags, environ={"NCCL_SOCKET_IFNAME": "eth"})
        agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
        agents.finish((1, 2))
    finally:
        for host in agents.hosts.hosts:
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    for number in (1, 2):
        used = (agents.directory / f"used.{number - 1}").read_text().split()
        assert used == ["fd77::1", f"fd77::{number}"], agents.story()


def test_a_machine_that_knows_its_own_name_as_its_loopback(agents: Agents) -> None:
    """As Debian's /etc/hosts has it; and what is chosen is told once, however many rounds."""
    own = agents.directory / "hosts"
    own.write_text("127.0.0.1 localhost\n127.0.1.1 host1\n10.77.0.2 host2\n")
    agents.hosts[1].run("mount", "--bind", str(own), "/etc/hosts")
    try:
        for number in (1, 2):
            journal = agents.directory / f"events.{number}"
            agents.start(number, *QUICK, "--max-restarts", "1", "--json-events", str(journal))
        agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
        agents.kill_worker(2)
        agents.wait_for({f"host{i}.0": f"1 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
        agents.finish((1, 2))
    finally:
        agents.hosts[1].run("umount", "/etc/hosts")
    assert (agents.directory / "used.0").read_text().split() == ["10.77.0.1"] * 2
    for number, reason in (
        (1, "it is the likeliest, because the other"),
        (2, "the route to host1"),
    ):
        assert agents.said(number).count("network: ") == 1
        lines = (agents.directory / f"events.{number}").read_text().splitlines()
        (event,) = [each for each in map(json.loads, lines) if each["event"] == "network"]
        assert (event["interface"], event["address"]) == ("eth0", f"10.77.0.{number}")
        assert event["reason"].startswith(reason)
        assert {"interface": "docker0", "why": "container bridge"} in event["passed_over"]


def test_a_bridge_of_containers_by_name_is_told_and_named_when_it_fails(agents: Agents) -> None:
    (agents.directory / "worker.py").write_text(FAILS)
    for number in (1, 2):
        flags = [*QUICK, *STATIC, "--node-rank", str(number - 1)]
        agents.start(number, *flags, environ={"GLOO_SOCKET_IFNAME": "docker0"})
    assert [agents.ended(number) for number in (1, 2)] == [1, 1]
    for number in (1, 2):
        assert "warning: network: docker0, 172.17.0.1 (MTU 1500): GLOO_SOC" in agents.said(number)
    assert "though host1 is at eth0 (10.77.0.1, " in agents.said(1)
    assert "though the route to host1 uses eth0 (10.77.0.2, " in agents.said(2)
    refused = agents.said(2).partition("refused: ")[2].splitlines()[0]
    assert "cannot connect to rank 0 at 172.17.0.1:" in refused
    assert "its host chose docker0: GLOO_SOCKET_IFNAME=docker0 says so, though" in refused
    assert "is at eth0 (10.77.0.1, " in refused


@pytest.mark.everyday
def test_where_shows_interfaces_and_the_choice(hosts: Hosts) -> None:
    where = (sys.executable, "-m", "rallypoint", "where", "--towards")
    said = hosts[2].run(*where, "10.88.0.1")
    rows = {line.split()[0]: line for line in said.splitlines() if "  " in line}
    assert rows["docker0"].endswith("  container bridge  MTU 1500")
    assert "10.88.0.2/24, fd88::2/64" in rows["fast0"]
    assert "virtual pair" in rows["fast0"]
    assert "several nodes: fast0, 10.88.0.2 (MTU 1500): the route to 10.88.0.1 uses" in said
    assert "fast0" not in hosts[1].run(*where, "10.88.0.2")
