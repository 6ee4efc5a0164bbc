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
from tests.system.etcd_cluster import member_command, need_etcd
from tests.system.nodes import Agents, children

from rallypoint.testing.hosts import Hosts

pytestmark = pytest.mark.system

SERVERS = (5, 6, 7)
CONF = "keep_alive_interval=0.3,keep_alive_max_attempt=8,close_timeout=2,outage_timeout=6"
QUICK = ("--rdzv-conf", f"last_call_timeout=0.5,{CONF}")
# Where as many come as can take part: then the last call costs nothing, however slow one is.
FULL = ("--rdzv-conf", f"last_call_timeout=15,{CONF}")

# Who coordinates, and which member of etcd leads: seen from inside the test network.
PROBE = """
import json, sys, urllib.request
from rallypoint.rendezvous.keyvalue.etcd_client import EtcdClient
from rallypoint.rendezvous.keyvalue.keys import Claim, JobKeys, unpack
places = [(f"host{i}", 2379) for i in (5, 6, 7)]
if sys.argv[1] == "coordinator":
    found = {p.key: p.value for p in EtcdClient(places).read(JobKeys.of("j", 0).vote).pairs}
    print(unpack(Claim, found[JobKeys.of("j", 0).claim]).leader.host)
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

    def start_three(self, *more: str, begins: int = 0) -> None:
        """Form a round of hosts 1 to 3."""
        for number in (1, 2, 3):
            self.start(number, "--nnodes", "2:3", *FULL, *more)
        self.wait_for({f"host{i}.0": f"{begins} {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})

    def wait_for_round(self, number: int, *hosts: int, or_later: bool = False) -> float:
        """Until these hosts have that round, whatever their ranks; the seconds it took."""
        begin, size = time.monotonic(), len(hosts)
        places = {f"{i}/{size} {i}/{size}" for i in range(size)}
        while True:
            said = [self.up().get(f"host{i}.0", "-1 ").split(" ", 1) for i in hosts]
            (newest, *others) = {int(text) for text, _ in said}
            is_it = newest == number or (or_later and newest > number)
            if is_it and not others and {place for _, place in said} == places:
                return time.monotonic() - begin
            assert time.monotonic() - begin < 20, (said, self.story())
            time.sleep(0.01)


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


def test_form_grow_and_end(agents: EtcdAgents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2:4", *QUICK)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.start(3, "--nnodes", "2:4", *QUICK, workers=2)
    agents.wait_for({"host1.0": "1 0/4 0/3", "host2.0": "1 1/4 1/3", "host3.1": "1 3/4 2/3"})
    agents.finish((1, 2, 3))


@pytest.mark.parametrize("silently", [False, True])
def test_the_coordinator_dies(agents: EtcdAgents, *, silently: bool) -> None:
    agents.start_three()
    dead = agents.ask("coordinator")
    if silently:
        agents.hosts.pull_cable(dead)
    else:
        agents.send(dead, signal.SIGKILL)
    others = {1, 2, 3} - {dead}
    took_s = agents.wait_for_round(1, *others)
    print(f"the others had another round after {took_s:.2f} s")
    assert agents.ask("coordinator") != dead
    if silently:
        agents.wait_until_said(dead, "no longer coordinates")
        agents.hosts.plug_cable(dead)
        agents.wait_for_round(2, 1, 2, 3, or_later=True)
    agents.finish([*others, dead] if silently else others)


def test_every_coordinator_dies_in_turn(agents: EtcdAgents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "1:3", *FULL)
    agents.wait_for_round(0, 1, 2, 3)
    first = agents.ask("coordinator")
    agents.send(first, signal.SIGKILL)
    agents.wait_for_round(1, *({1, 2, 3} - {first}))
    second = agents.ask("coordinator")
    agents.send(second, signal.SIGKILL)
    (last,) = {1, 2, 3} - {first, second}
    agents.wait_for({f"host{last}.0": "2 0/1 0/1"})
    # The last one as well, and a new agent finds what etcd has kept.
    agents.send(last, signal.SIGKILL)
    agents.start(4, "--nnodes", "1:3", *QUICK)
    agents.wait_for({"host4.0": "3 0/1 0/1"}, within_s=30)
    agents.finish([4])


@pytest.mark.parametrize("which", ["leader", "another"])
def test_a_member_of_etcd_dies(agents: EtcdAgents, which: str) -> None:
    agents.start_three()
    leader = agents.ask("leader")
    dead = leader if which == "leader" else SERVERS[SERVERS.index(leader) - 1]
    agents.signal_server(dead, signal.SIGKILL)
    time.sleep(3)  # longer than a silent agent would be waited for
    assert {text.split()[0] for text in agents.up().values()} == {"0"}, agents.story()
    lost = agents.ask("coordinator")
    agents.send(lost, signal.SIGKILL)
    agents.wait_for_round(1, *({1, 2, 3} - {lost}))
    agents.finish({1, 2, 3} - {lost})


def test_the_leader_of_etcd_and_the_coordinator_die_at_once(agents: EtcdAgents) -> None:
    agents.start_three()
    lost = agents.ask("coordinator")
    agents.signal_server(agents.ask("leader"), signal.SIGKILL)
    agents.send(lost, signal.SIGKILL)
    took_s = agents.wait_for_round(1, *({1, 2, 3} - {lost}))
    print(f"the others had another round after {took_s:.2f} s")
    agents.finish({1, 2, 3} - {lost})


def test_a_job_runs_on_while_etcd_is_away_for_a_while(agents: EtcdAgents) -> None:
    agents.start_three()
    for number in SERVERS:
        agents.signal_server(number, signal.SIGSTOP)
    time.sleep(4)  # more than 2.4 s of silence, less than outage_timeout
    assert {text.split()[0] for text in agents.up().values()} == {"0"}, agents.story()
    for number in SERVERS:
        agents.signal_server(number, signal.SIGCONT)
    agents.start(4, "--nnodes", "2:3", *QUICK)
    time.sleep(2)
    assert {text.split()[0] for text in agents.up().values()} == {"0"}, agents.story()
    lost = agents.ask("coordinator")
    agents.send(lost, signal.SIGKILL)
    others = {1, 2, 3, 4} - {lost}
    agents.wait_for_round(1, *others, or_later=True)
    agents.finish(others)


def test_without_etcd_for_too_long_nothing_runs(agents: EtcdAgents) -> None:
    agents.start_three()
    for number in SERVERS:
        agents.signal_server(number, signal.SIGKILL)
    for number in (1, 2, 3):
        agents.wait_until_said(number, "coordinat", within_s=20)
    agents.wait_until_said(1, "waiting for 10 s so far: no coordinator found", within_s=30)
    agents.wait_until_said(1, "no etcd member at host5:2379, host6:2379, host7:2379 answered")
    agents.wait_until_said(1, "Connection refused")


def test_a_stopped_job_can_be_started_again_at_once(agents: EtcdAgents) -> None:
    agents.start_three()
    for number in (1, 2, 3):
        agents.send(number, signal.SIGTERM)
    for number in (1, 2, 3):
        assert agents.ended(number) == 128 + signal.SIGTERM, agents.story()
    for path in agents.directory.glob("up.*"):
        path.unlink()
    agents.start_three()
    agents.finish((1, 2, 3))


def test_who_comes_too_late_is_told_so_for_a_while(agents: EtcdAgents) -> None:
    agents.start_three()
    agents.finish((1, 2, 3))
    agents.start(4, "--nnodes", "1:3", *QUICK)
    assert agents.ended(4) == 1
    assert "the job 'j' is over (every worker succeeded)" in agents.said(4)
    assert "host4.0" not in agents.up()
    time.sleep(4)  # close_timeout, and etcd looks at its leases twice a second
    agents.start(4, "--nnodes", "1:3", *QUICK)
    agents.wait_for({"host4.0": "0 0/1 0/1"})
    assert agents.ended(4) == 0


def test_another_attempt_is_another_job(
    agents: EtcdAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents.start_three()
    agents.finish((1, 2, 3))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    agents.start_three()
    for number in (1, 2, 3):
        assert agents.ended(number) == 0
