"""Jobs whose agents meet at an etcd cluster: any node may die, and any one member of etcd."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.conftest import Launch
from tests.system.etcd_cluster import Cluster, member_command, need_etcd
from tests.system.everyday import wait_until
from tests.system.nodes import WORKER, Agents, children, launches

pytestmark = pytest.mark.system

SERVERS = (5, 6, 7)
CONF = "keep_alive_interval=0.3,keep_alive_max_attempt=8,close_timeout=2,outage_timeout=6"
QUICK = ("--rdzv-conf", f"last_call_timeout=0.5,{CONF}")
# Where as many come as can take part: then the last call costs nothing, however slow one is.
FULL = ("--rdzv-conf", f"last_call_timeout=60,{CONF}")

# Who coordinates, and which member of etcd leads: seen from inside the test network.
PROBE = """
import json, sys, urllib.request
from rallypoint.rendezvous.keyvalue.etcd_client import EtcdClient
from rallypoint.rendezvous.keyvalue.keeper import Claim, JobKeys, unpack
places = [(f"host{i}", 2379) for i in (5, 6, 7)]
if sys.argv[1] == "coordinator":
    found = {p.key: p.value for p in EtcdClient(places).read(JobKeys("j", 0).vote).pairs}
    print(unpack(Claim, found[JobKeys("j", 0).claim]).leader.host)
for host, port in places if sys.argv[1] == "leader" else ():
    url = f"http://{host}:{port}/v3/maintenance/status"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        status = json.load(opener.open(urllib.request.Request(url, b"{}"), timeout=5))
    except OSError:  # two of three suffice; this one may still be starting
        continue
    if status.get("leader") == status["header"]["member_id"]:
        print(host)
"""


class EtcdAgents(Agents):
    """Agents on hosts 1 to 4, and etcd on three more."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        super().__init__(hosts, directory)
        places = ",".join(f"host{number}:2379" for number in SERVERS)
        self.flags = ["--rdzv-backend", "etcd", "--rdzv-endpoint", places, "--rdzv-id", "j"]
        clients = [f"http://{hosts[number].address}:2379" for number in SERVERS]
        peers = [f"http://{hosts[number].address}:2380" for number in SERVERS]
        environ = {name: text for name, text in os.environ.items() if "ETCD_" not in name}
        self.servers = {
            number: hosts[number].popen(
                member_command(i, directory, clients, peers),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environ,
            )
            for i, number in enumerate(SERVERS)
        }

    def ask(self, what: str) -> int:
        """The number of the host that is "coordinator", or the "leader" of etcd."""
        # Host 4's cable is never pulled.
        return int(self.hosts[4].run(sys.executable, "-c", PROBE, what).strip()[4:])

    def signal_server(self, number: int, signal_number: signal.Signals) -> None:
        """To the member of etcd on that host; nsenter, which started it, stops when it does."""
        (pid,) = children(self.servers[number].pid)
        os.kill(pid, signal_number)
        if signal_number == signal.SIGCONT:
            self.servers[number].send_signal(signal_number)

    def close(self) -> None:
        for server in self.servers.values():
            if server.poll() is None:
                for pid in children(server.pid):
                    os.kill(pid, signal.SIGKILL)
                server.kill()
                server.wait()

    def start_three(self) -> None:
        """Form a round of hosts 1 to 3."""
        for number in (1, 2, 3):
            self.start(number, "--nnodes", "2:3", *FULL)
        self.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    need_etcd()
    with Hosts(7) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[EtcdAgents]:
    agents = EtcdAgents(hosts, tmp_path)
    yield agents
    left = [number for number in (1, 2, 3, 4) if agents.end_all(number)]
    agents.close()
    hosts.repair()
    assert left == []


@pytest.mark.everyday
def test_agents_meet_at_etcd_and_one_is_lost(tmp_path: Path) -> None:
    """All on this machine."""
    cluster = Cluster(tmp_path, 1)
    ((host, port),) = cluster.endpoints
    flags = ["--rdzv-backend", "etcd", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", "j"]
    flags += ["--rdzv-conf", "last_call_timeout=60,read_timeout=60,outage_timeout=120"]
    flags += ["--nnodes", "1:2", "--local-addr", "127.0.0.1"]
    try:
        with launches(tmp_path, 2) as nodes:
            for node in nodes:
                node.start(*flags, node.script(WORKER))
            wait_until(lambda: {said(node) for node in nodes} == {"0 0/2 0/2", "0 1/2 1/2"})
            lost, left = nodes
            assert lost.process is not None and left.process is not None
            lost.process.kill()
            wait_until(lambda: said(left) == "1 0/1 0/1")
            (left.directory / "go").touch()
            assert left.process.wait(100) == 0, left.err
    finally:
        cluster.close()


def test_etcd_is_not_taken_for_a_program_in_the_way(launch: Launch) -> None:
    cluster = Cluster(launch.directory, 1)
    ((host, port),) = cluster.endpoints
    flags = ["--rdzv-backend", "etcd", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", "j"]
    flags += ["--rdzv-conf", "join_timeout=8", "--nnodes", "2", "--local-addr", "127.0.0.1"]
    try:
        assert launch.run(*flags, launch.script("")) == 1
        assert "1 of 2 nodes joined" in launch.err
        assert "is held by" not in launch.err
    finally:
        cluster.close()


def test_another_attempt_is_another_job(launch: Launch) -> None:
    """A scheduler's: the one before is over, and whoever comes to that is told so for a while."""
    cluster = Cluster(launch.directory, 1)
    ((host, port),) = cluster.endpoints
    flags = ["--rdzv-backend", "etcd", "--rdzv-endpoint", f"{host}:{port}", "--rdzv-id", "j"]
    flags += ["--rdzv-conf", "last_call_timeout=0.1,close_timeout=300", "--nnodes", "1:2"]
    flags += ["--local-addr", "127.0.0.1", launch.script("")]
    try:
        assert launch.run(*flags) == 0, launch.err
        assert launch.run(*flags) == 1
        assert "the job 'j' is over (every worker succeeded)" in launch.err
        assert launch.run(*flags, environ={"SLURM_RESTART_COUNT": "1"}) == 0, launch.err
    finally:
        cluster.close()


def said(node: Launch) -> str:
    """What its worker said last."""
    return "".join(path.read_text() for path in node.directory.glob("up.*"))


def test_form_grow_and_end(agents: EtcdAgents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2:4", *QUICK)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.start(3, "--nnodes", "2:4", *QUICK, workers=2)
    agents.wait_for({"host1.0": "1 0/4 0/3", "host2.0": "1 1/4 1/3", "host3.1": "1 3/4 2/3"})
    agents.finish((1, 2, 3))


def test_the_coordinator_dies(agents: EtcdAgents) -> None:
    agents.start_three()
    dead = agents.ask("coordinator")
    agents.send(dead, signal.SIGKILL)
    others = {1, 2, 3} - {dead}
    agents.wait_for_size(others, after=0)
    assert agents.ask("coordinator") != dead
    agents.finish(others)


def test_the_leader_of_etcd_and_the_coordinator_die_at_once(agents: EtcdAgents) -> None:
    agents.start_three()
    lost = agents.ask("coordinator")
    agents.signal_server(agents.ask("leader"), signal.SIGKILL)
    agents.send(lost, signal.SIGKILL)
    others = {1, 2, 3} - {lost}
    agents.wait_for_size(others, after=0)
    agents.finish(others)


def test_a_job_runs_on_while_etcd_is_away_for_a_while(agents: EtcdAgents) -> None:
    """It is stopped: connections stay, and nobody answers."""
    agents.start_three()
    for number in SERVERS:
        agents.signal_server(number, signal.SIGSTOP)
    time.sleep(4)  # more than 2.4 s of silence, less than outage_timeout
    assert {text.split()[0] for text in agents.up().values()} == {"0"}, agents.story()
    for number in SERVERS:
        agents.signal_server(number, signal.SIGCONT)
    lost = agents.ask("coordinator")
    agents.send(lost, signal.SIGKILL)
    others = {1, 2, 3} - {lost}
    agents.wait_for_size(others, after=0)
    agents.finish(others)
