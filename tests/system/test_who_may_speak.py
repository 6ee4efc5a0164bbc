"""What a third machine can do to a job of two: nothing, and nothing by mere numbers either."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.everyday import wait_until
from tests.system.nodes import Agents

pytestmark = pytest.mark.system

QUICK = ("--rdzv-conf", "last_call_timeout=0.5")
# Sets a key in the store at HOST:PORT, and says whether the store answered within SECONDS.
INTRUDER = """
import sys
from datetime import timedelta
from rallypoint.base.errors import StoreError
from rallypoint.store.client import TCPStore
host, port, seconds = sys.argv[1], *map(int, sys.argv[2:])
try:
    with TCPStore(host, port, timeout=timedelta(seconds=seconds)) as store:
        store.set("intruder", "was here")
        print("in", store.get("intruder"))
except StoreError as error:
    print("out")
"""
WORKER = """
import os, time
with open("store." + os.uname().nodename, "w") as file:
    file.write(os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
with open("token." + os.uname().nodename, "w") as file:
    file.write(os.environ.get("RALLYPOINT_TOKEN", ""))
"""


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        (tmp_path / "worker.py").write_text(WORKER + (tmp_path / "worker.py").read_text())
        yield agents


def start_two(agents: Agents, backend: str) -> None:
    for number in (1, 2):
        flags = ["--nnodes", "2"]
        if backend == "static":
            flags = ["--nnodes", "2", "--rdzv-backend", "static", "--rdzv-endpoint", ""]
            flags += ["--node-rank", str(number - 1), "--master-addr", "host1"]
        agents.start(number, *flags)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})


@pytest.mark.parametrize("backend", ["static", pytest.param("c10d", marks=pytest.mark.everyday)])
def test_a_third_host_cannot_touch_the_workers_store(agents: Agents, backend: str) -> None:
    """Nor do workers have the token: they have a secret of the round."""
    start_two(agents, backend)
    where = (agents.directory / "store.host2").read_text().split()
    intruder = (sys.executable, "-c", INTRUDER, *where)
    assert agents.hosts[3].run(*intruder, "1") == "out\n"
    assert agents.hosts[2].run(*intruder, "100").startswith("in")
    agents.wait_until_said(1, "10.77.0.3")  # who was turned away
    secrets = {(agents.directory / f"token.host{number}").read_text() for number in (1, 2)}
    assert len(secrets) == 1
    assert secrets.isdisjoint({"", "secret"})
    agents.finish((1, 2))


def test_strangers_at_the_endpoint_cost_neither_cpu_nor_the_job(agents: Agents) -> None:
    """More connections than the agent may have descriptors, from another host."""
    agents.start(1, "--nnodes", "2:3", *QUICK)
    agents.start(2, "--nnodes", "2:3", *QUICK)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
    crowded = agents.directory / "crowded"
    pid = agents.pid(1)
    subprocess.run(["prlimit", f"--pid={pid}", "--nofile=200:200"], check=True)
    code = (
        "import socket, time\n"
        "crowd = []\n"
        "end = time.monotonic() + 4\n"
        "while time.monotonic() < end:\n"
        "    try:\n"
        "        crowd.append(socket.create_connection(('host1', 29400), 0.2))\n"
        "    except OSError:\n"
        "        time.sleep(0.01)\n"
        "    if len(crowd) > 200: open('crowded', 'w').close()\n"
        "    if len(crowd) > 600: time.sleep(0.05); crowd = crowd[300:]\n"
    )
    crowd = agents.hosts[3].popen([sys.executable, "-c", code], cwd=agents.directory)
    wait_until(crowded.exists)
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(2)
    share = (cpu_s(pid) - before) / (time.monotonic() - began)
    crowd.wait()
    assert share < 0.5
    agents.start(3, "--nnodes", "2:3", *QUICK)
    agents.wait_for({f"host{i}.0": f"1 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.finish((1, 2, 3))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_chosen_address_is_the_only_one_that_is_listened_at(agents: Agents) -> None:
    agents.start(1, "--nnodes", "2")
    agents.start(2, "--nnodes", "2", "--node-rank", "1", "--local-addr", "10.77.0.2")
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
    lines = agents.hosts[2].run("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
    places = [line.split()[1].partition(":")[0] for line in lines if line.split()[3] == "0A"]
    assert places == [bytes(reversed(socket.inet_aton("10.77.0.2"))).hex().upper()]
    agents.finish((1, 2))


def test_an_interface_by_name(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2", environ={"GLOO_SOCKET_IFNAME": "eth0"})
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
    agents.finish((1, 2))
    agents.start(3, "--nnodes", "2", environ={"GLOO_SOCKET_IFNAME": "nosuch"})
    assert agents.ended(3) == 1
    assert "GLOO_SOCKET_IFNAME=nosuch: no interface of this machine" in agents.said(3)


# Of the intruder on each host, in seconds.
LIMITS = {1: "100", 2: "100", 3: "1"}
# A node of a program's own rendezvous: says where its round's store is, until there is a file "go".
NODE = """
import datetime, os, sys, time
from rallypoint.rendezvous import *
from rallypoint.store.file import FileStore
directory, = sys.argv[1:]
handler = DynamicRendezvousHandler.from_backend(
    "r", FileStore(directory + "/store"), "any", 2, 2,
    timeout=RendezvousTimeout(join=datetime.timedelta(seconds=60)),
)
place = handler.next_rendezvous().bootstrap_store_info
with open(f"{directory}/at.{os.uname().nodename}", "w") as file:
    file.write(f"{place.master_addr} {place.master_port} ")
while not os.path.exists(directory + "/go"):
    time.sleep(0.05)
handler.shutdown()
"""


def test_a_third_host_cannot_touch_the_store_of_a_programs_rendezvous(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Nor does it listen anywhere but where the user said."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "RALLYPOINT_PORT_RANGE": "21000-21009"}
    with (tmp_path / "said").open("wb") as said:
        command = [sys.executable, "-c", NODE, str(tmp_path)]
        nodes = [hosts[i].popen(command, stderr=said, env=environ) for i in (1, 2)]
        try:
            files = [tmp_path / f"at.host{number}" for number in (1, 2)]
            wait_until(lambda: all(f.exists() and f.read_text().endswith(" ") for f in files))
            address, port = files[0].read_text().split()
            intruder = (sys.executable, "-c", INTRUDER, address, port)
            told = [hosts[number].run(*intruder, limit) for number, limit in LIMITS.items()]
            server = hosts[int(address[-1])]
            lines = server.run("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
            places = {line.split()[1] for line in lines if line.split()[3] == "0A"}
        finally:
            (tmp_path / "go").touch()
            codes = [node.wait(60) for node in nodes]
    assert codes == [0, 0]
    assert [text.split()[0] for text in told] == ["in", "in", "out"]
    assert "10.77.0.3" in (tmp_path / "said").read_text()  # who was turned away
    assert address in ("10.77.0.1", "10.77.0.2")
    assert int(port) in range(21000, 21010)
    hexed = bytes(reversed(socket.inet_aton(address))).hex().upper()
    assert {place.partition(":")[0] for place in places} == {hexed}
    ports = {int(place.partition(":")[2], 16) for place in places}
    assert int(port) in ports  # the other one is the node's own
    assert ports <= set(range(21000, 21010))


@pytest.mark.everyday
def test_require_token(agents: Agents) -> None:
    agents.start(1, "--nnodes", "2", "--require-token", token="")
    assert agents.ended(1) == 2
    assert "--require-token" in agents.said(1)
    for number in (1, 2):
        agents.start(number, "--nnodes", "2", "--require-token")
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
    agents.finish((1, 2))


@pytest.mark.everyday
def test_a_port_range_bounds_every_listener(agents: Agents) -> None:
    agents.directory.joinpath("worker.py").write_text(
        "import rallypoint as dist, numpy as np\n"
        "dist.init_process_group()\n"
        "dist.all_reduce(np.ones(4))\n" + agents.directory.joinpath("worker.py").read_text()
    )
    for number in (1, 2):
        agents.start(number, "--nnodes", "2", "--port-range", "21000-21009")
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/2 {i - 1}/2" for i in (1, 2)})
    for number in (1, 2):
        lines = agents.hosts[number].run("cat", "/proc/net/tcp", "/proc/net/tcp6").splitlines()
        listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        ports = {int(place.rpartition(":")[2], 16) for place in listening}
        assert ports <= {29400, *range(21000, 21010)}
        assert len(ports) >= 2 - (number == 2)
    agents.finish((1, 2))
