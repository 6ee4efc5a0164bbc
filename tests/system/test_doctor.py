"""`rallypoint doctor` on three test hosts: each fault is one red line, whose advice cures it.

The tests do what the line says, and examine again: then nothing is found. What each check says of
which facts is held by tests/unit/doctor; the faults here are those of a real network.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import SOON_S
from tests.hosts import Hosts
from tests.remote_shell import RemoteShell
from tests.system.nodes import alive_on

pytestmark = pytest.mark.system

DOCTOR = (sys.executable, "-m", "rallypoint", "doctor")
HOSTS = "host1,host2,host3"
# A clock that is ahead by AHEAD_S, for a program that is started so.
FAST_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += atoi(getenv("AHEAD_S"));
    return status;
}
"""


class FaultyCluster:
    """Three hosts, a stand-in for ssh, and what goes wrong with them."""

    def __init__(self, hosts: Hosts, shell: RemoteShell, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self._shell = shlex.join(shell.command)
        self._names = hosts.names.read_text()
        self._undo: list[Callable[[], object]] = []
        self.environ: dict[str, str] = {}

    # Faults. `heal` undoes those that are left.

    def filter(self, number: int, rule: str) -> None:
        """Have the host's firewall do something with what comes in."""
        host = self.hosts[number]
        host.run("nft", "add table inet doctor")
        host.run("nft", "add chain inet doctor in { type filter hook input priority 0; }")
        host.run("nft", f"add rule inet doctor in {rule}")
        self._undo.append(lambda: host.run("nft", "flush ruleset"))

    def accept(self, number: int, rule: str) -> None:
        """Have the host's firewall allow something, whatever other rules say."""
        self.hosts[number].run("nft", f"insert rule inet doctor in {rule} accept")

    def rename(self, line: str, instead: str) -> None:
        """Change a line of the /etc/hosts of all."""
        assert line in self._names
        self.hosts.names.write_text(self._names.replace(line, instead))
        self._undo.append(lambda: self.hosts.names.write_text(self._names))

    def do(self, number: int, *command: str, undo: str = "") -> None:
        self.hosts[number].run(*command)
        if undo:
            self._undo.append(lambda: self.hosts[number].run("sh", "-c", f"{undo} || true"))

    def set(self, number: int, **environ: str) -> None:
        """Variables that only what is started on that host has."""
        self.environ = {"HOST": f"host{number}", **environ}

    def heal(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.environ = {}

    # Examinations.

    def examine(self, *words: str, hosts: str = HOSTS) -> dict[str, Any]:
        """The report of `rallypoint doctor --hosts`."""
        process = self.begin(*words, hosts=hosts)
        out, err = process.communicate(timeout=100)
        assert process.returncode in (0, 1), err
        report: dict[str, Any] = json.loads(out)
        assert process.returncode == (report["level"] == "red"), err
        return report

    def begin(self, *words: str, hosts: str = HOSTS) -> subprocess.Popen[str]:
        """`rallypoint doctor --hosts`."""
        return subprocess.Popen(
            [*DOCTOR, "--hosts", hosts, "--rsh", str(self._rsh()), "--json", *words],
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.directory)},
        )

    def meet(
        self, *words: str, environ: Mapping[int, Mapping[str, str]] | None = None
    ) -> dict[int, dict[str, Any]]:
        """The reports of the same command on each host, by the host's number."""
        begun = {}
        for host in self.hosts.hosts:
            own = {"RALLYPOINT_TOKEN": "secret", **(environ or {}).get(host.number, {})}
            begun[host.number] = host.popen(
                [*DOCTOR, "--json", "--nnodes", "3", "--wait", "3", *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self.directory,
                env={**os.environ, "TMPDIR": str(self.directory), **own},
            )
        said = {number: process.communicate(timeout=100) for number, process in begun.items()}
        assert all(process.returncode in (0, 1) for process in begun.values()), said
        return {number: json.loads(out) for number, (out, _) in said.items()}

    def launch(
        self, number: int, *words: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """`rallypoint run` on a host."""
        return self.hosts[number].popen(
            [sys.executable, "-m", "rallypoint", "run", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.directory,
            env={**os.environ, "RALLYPOINT_TOKEN": "secret", **(environ or {})},
        )

    def left_over(self) -> list[int]:
        deadline = time.monotonic() + 60
        while left := [pid for host in self.hosts.hosts for pid in alive_on(host)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return left

    def _rsh(self) -> Path:
        """What --rsh names: it gives one host the variables of `set`."""
        own = shlex.join(f"{name}={text}" for name, text in self.environ.items() if name != "HOST")
        path = self.directory / "rsh"
        path.write_text(
            "#!/bin/sh\nhost=$1\nshift\n"
            f'[ "$host" = "{self.environ.get("HOST", "")}" ] && set -- env {own} "$@"\n'
            f'exec {self._shell} "$host" "$@"\n'
        )
        path.chmod(0o700)
        return path


@pytest.fixture(scope="module")
def all_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    directory = tmp_path_factory.mktemp("doctor")
    with Hosts(3) as hosts, RemoteShell(hosts, directory) as shell:
        yield FaultyCluster(hosts, shell, directory)


@pytest.fixture
def cluster(needs_hosts: None, request: pytest.FixtureRequest) -> Iterator[FaultyCluster]:
    cluster: FaultyCluster = request.getfixturevalue("all_hosts")
    yield cluster
    cluster.heal()
    assert cluster.left_over() == []


def red(report: Mapping[str, Any]) -> list[str]:
    return [each["text"] for each in report["findings"] if each["level"] == "red"]


def advised(line: str, pattern: str) -> tuple[str, ...]:
    """What the advice of a line names."""
    found = re.search(pattern, line)
    assert found is not None, line
    return found.groups()


def the_red_line(report: Mapping[str, Any]) -> str:
    """There is one, and nothing else."""
    assert [each["level"] for each in report["findings"]] == ["red"], report["findings"]
    text: str = report["findings"][0]["text"]
    return text


def examine_here(directory: Path, *words: str) -> list[str]:
    """The red lines of an examination without test hosts."""
    done = subprocess.run(
        [*DOCTOR, "--json", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TMPDIR": str(directory)},
    )
    assert done.returncode == 1, done
    return red(json.loads(done.stdout))


@pytest.mark.everyday
def test_a_port_that_is_held(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as held:
        endpoint = f"127.0.0.1:{held.getsockname()[1]}"
        where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
        lines = examine_here(tmp_path, *where)
    port = endpoint.partition(":")[2]
    begin = f"port {port} of the endpoint ({endpoint}) is held by process "
    (line,) = [line for line in lines if begin in line]
    (pid,) = advised(line, r" held by process (\d+) \(.*; end that process, or choose another port")
    assert int(pid) == os.getpid()


@pytest.mark.everyday
def test_a_host_that_ssh_does_not_reach(tmp_path: Path) -> None:
    hosts = f"{os.uname().nodename},elsewhere.invalid"
    lines = examine_here(tmp_path, "--hosts", hosts, "--rsh", "false")
    (line,) = [line for line in lines if line.startswith("elsewhere.invalid: ")]
    assert line.startswith("elsewhere.invalid: cannot start anything there: the connection ended")
    assert "`ssh elsewhere.invalid true`" in line


def test_a_healthy_cluster(cluster: FaultyCluster) -> None:
    words = ("--path", str(cluster.directory), "--nproc-per-node", "1")
    report = cluster.examine(*words)
    assert report["findings"] == []
    print(f"a healthy cluster of three hosts: {report['seconds']} s")
    assert report["seconds"] <= max(5.0, SOON_S)
    assert [each["level"] for each in report["checks"]] == ["green"] * 16
    assert report["nodes"] == HOSTS.split(",")
    assert len(report["facts"]["probes"]) == 6
    assert all(each["mbit_s"] > 0 < each["latency_us"] for each in report["facts"]["probes"])


ENDPOINT = ("--rdzv-endpoint", "host1:29400")


def test_a_blocked_port(cluster: FaultyCluster) -> None:
    cluster.filter(1, "tcp dport 29400 drop")
    line = the_red_line(cluster.examine(*ENDPOINT))
    assert line.startswith("host2, host3: host1:29400, the rendezvous endpoint, does not answer")
    port, host = advised(line, r"allow TCP to port (\d+) in the firewall of host(\d)")
    assert (port, host) == ("29400", "1")
    cluster.accept(int(host), f"tcp dport {port}")
    assert cluster.examine(*ENDPOINT)["findings"] == []


def test_a_one_way_firewall(cluster: FaultyCluster) -> None:
    cluster.filter(3, "ip saddr 10.77.0.2 tcp flags & (syn|ack) == syn drop")
    words = ("--port-range", "21000-21015")
    line = the_red_line(cluster.examine(*words))
    assert line.startswith("host2: cannot connect to host3, though host3 can connect the other way")
    source, ports, target = advised(line, r"allow TCP from host(\d) to ports (\S+) of host(\d)")
    assert (source, ports, target) == ("2", "21000-21015", "3")
    cluster.accept(int(target), f"ip saddr 10.77.0.{source} tcp dport {ports}")
    assert cluster.examine(*words)["findings"] == []


def test_a_slow_link(cluster: FaultyCluster) -> None:
    shape = ("root", "tbf", "rate", "10mbit", "burst", "32kbit", "latency", "50ms")
    cluster.do(3, "tc", "qdisc", "add", "dev", "eth0", *shape, undo="tc qdisc del dev eth0 root")
    line = the_red_line(cluster.examine())
    assert line.startswith("host3: data ")
    assert " Mbit/s, while other links reach " in line
    assert "limits on that link (tc qdisc), or leave that node out" in line
    assert cluster.examine(hosts="host1,host2")["findings"] == []
    assert "tbf" in cluster.hosts[3].run("tc", "qdisc", "show", "dev", "eth0")
    cluster.do(3, "tc", "qdisc", "del", "dev", "eth0", "root")
    assert cluster.examine()["findings"] == []


def test_an_mtu_black_hole(cluster: FaultyCluster) -> None:
    for number in (1, 2, 3):  # so that the kernel hands over packets as they are on a wire
        cluster.do(number, "ip", "link", "set", "eth0", "gso_max_segs", "1",
                   undo="ip link set eth0 gso_max_segs 65535")  # fmt: skip
    cluster.filter(3, "ip protocol tcp meta length > 1450 drop")
    line = the_red_line(cluster.examine())
    assert line.startswith("host3: messages to it that are larger than a packet of the network get")
    (command,) = advised(line, r"lower the MTU on all nodes \((.*), say\)")
    for number in (1, 2, 3):
        cluster.do(number, *command.split(), undo="ip link set eth0 mtu 1500")
    assert cluster.examine()["findings"] == []


def test_a_clock_that_is_ahead(cluster: FaultyCluster, tmp_path: Path) -> None:
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(FAST_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    cluster.set(3, LD_PRELOAD=str(library), AHEAD_S="10")
    line = the_red_line(cluster.examine())
    assert line.startswith("host3: its clock is 10.0 s ahead of the others")
    assert "let a time service set it: timedatectl set-ntp true" in line
    cluster.set(3, LD_PRELOAD=str(library), AHEAD_S="0")
    assert cluster.examine()["findings"] == []


def test_what_ends_it_leaves_nothing(cluster: FaultyCluster) -> None:
    os.mkfifo(fifo := cluster.directory / "fifo")
    process = cluster.begin("--path", str(fifo))
    deadline = time.monotonic() + 60
    while not any(alive_on(host) for host in cluster.hosts.hosts):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert "Traceback" not in err


def test_nodes_meet_at_the_endpoint(cluster: FaultyCluster) -> None:
    """Each of the hosts that an endpoint names listens there."""
    words = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400,host2:29400")
    reports = cluster.meet(*words)
    assert [report["findings"] for report in reports.values()] == [[], [], []]
    assert sorted(reports[3]["nodes"]) == HOSTS.split(",")
    assert len(reports[1]["facts"]["probes"]) == len(reports[1]["facts"]["endpoint_probes"]) == 6


def test_a_wrong_token(cluster: FaultyCluster) -> None:
    words = (*ENDPOINT, "--rdzv-backend", "c10d")
    reports = cluster.meet(*words, environ={3: {"RALLYPOINT_TOKEN": "other"}})
    for number, begins in (
        (1, "the node at 10.77.0.3 has a different token"),
        (2, "the node at 10.77.0.3 has a different token"),
        (3, "the node at host1:29400 has a different token than this one"),
    ):
        line = the_red_line(reports[number])
        assert line.startswith(begins)
        assert "set the same RALLYPOINT_TOKEN, or --token-file, on all nodes" in line
    cured = cluster.meet(*words)  # all have the same
    assert [report["findings"] for report in cured.values()] == [[], [], []]


def test_a_blocked_port_where_nodes_meet(cluster: FaultyCluster) -> None:
    cluster.filter(1, "ip saddr 10.77.0.2 tcp dport 29400 drop")
    reports = cluster.meet("--rdzv-backend", "c10d", *ENDPOINT)
    line = the_red_line(reports[2])
    assert line.startswith("host2: host1:29400, the rendezvous endpoint, does not answer")
    assert "allow TCP to port 29400 in the firewall of host1" in line
    assert the_red_line(reports[1]).startswith(
        "2 of 3 nodes connected to host1:29400 within 3 s: host1, "
    )


def test_a_rendezvous_that_times_out_says_why(cluster: FaultyCluster) -> None:
    """Four jobs, each with a fault of its own; the guests say what it is."""
    cluster.filter(1, "ip saddr 10.77.0.2 tcp dport 29401 drop")
    cluster.filter(1, "ip saddr 10.77.0.3 tcp dport 21000-21015 tcp flags & (syn|ack) == syn drop")
    cluster.rename("10.77.0.3 host3", "127.0.1.1 host3")
    short = ("--nnodes", "2", "--rdzv-conf", "timeout=5,join_timeout=5")
    dynamic = (*short, "--rdzv-backend", "c10d", "--rdzv-endpoint")
    first = (*short, "--node-rank", "0", "--master-addr")
    second = (*short, "--node-rank", "1", "--master-addr")
    ranged = {"RALLYPOINT_PORT_RANGE": "21000-21015"}
    nowhere = {"RALLYPOINT_SOCKET_IFNAME": "ib0"}
    begun = {
        "host": cluster.launch(1, *dynamic, "host1:29401", "-m", "this"),
        "blocked port": cluster.launch(2, *dynamic, "host1:29401", "-m", "this"),
        "ranged": cluster.launch(1, *first, "host1", "-m", "this", environ=ranged),
        "one way": cluster.launch(3, *second, "host1", "-m", "this"),
        "variable": cluster.launch(2, *dynamic, "host1:29402", "-m", "this", environ=nowhere),
        "own name": cluster.launch(3, *first, "host3", "--master-port", "29503", "-m", "this"),
        "its name": cluster.launch(2, *second, "host3", "--master-port", "29503", "-m", "this"),
    }
    said = {name: ended(process) for name, process in begun.items()}
    for name, text in (
        (
            "blocked port",
            "found on host2: host1:29401, the rendezvous endpoint, does not answer",
        ),
        ("blocked port", "allow TCP to port 29401 in the firewall of host1"),
        ("one way", "where the first node's agent listens, does not answer"),
        ("one way", "in the firewall of host1"),
        ("variable", "RALLYPOINT_SOCKET_IFNAME=ib0: no interface of this machine that is up"),
        ("own name", "found on host3: the name host3 resolves to 127.0.1.1, a loopback address"),
        ("own name", "put '10.77.0.3 host3' in /etc/hosts instead of 127.0.1.1 host3"),
        ("its name", "found on host2: the name host3 resolves to 127.0.1.1, a loopback address"),
    ):
        assert text in said[name], (name, said[name])


FORM = """
import datetime, rallypoint
rallypoint.init_process_group(timeout=datetime.timedelta(seconds=8))
rallypoint.barrier()
"""


MEET = """
import datetime, rallypoint
rallypoint.init_process_group(init_method="tcp://host1:29600", rank=1, world_size=2,
                              timeout=datetime.timedelta(seconds=3))
"""


def test_an_engine_connection_that_fails_says_why(cluster: FaultyCluster) -> None:
    """A firewall lets ranks 1 and 2 connect one way; rank 0 of the other job is elsewhere."""
    cluster.filter(2, "ip saddr 10.77.0.3 tcp flags & (syn|ack) == syn drop")
    cluster.do(1, "ip", "link", "add", "docker0", "type", "bridge", undo="ip link del docker0")
    cluster.do(1, "ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
    cluster.do(1, "ip", "link", "set", "docker0", "up")
    (cluster.directory / "form.py").write_text(FORM)
    three = [
        cluster.launch(rank + 1, "--nnodes", "3", "--node-rank", str(rank), "--master-addr",
                      "host1", "form.py")
        for rank in range(3)
    ]  # fmt: skip
    chosen = {"RALLYPOINT_SOCKET_IFNAME": "docker0"}
    two = [
        cluster.launch(rank + 1, "--nnodes", "2", "--node-rank", str(rank), "--master-addr",
                      "host1", "--master-port", "29501", "form.py",
                      environ={} if rank else chosen)
        for rank in range(2)
    ]  # fmt: skip
    cluster.filter(1, "tcp dport 29600 drop")
    alone = cluster.hosts[3].popen(
        [sys.executable, "-c", MEET], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said = [ended(process) for process in [*three, *two, alone]]
    # Whoever gives up first has the job ended: the caller or the one who waits for it.
    caller = "found on host3: 10.77.0.2:"
    listener = "so a firewall may block the other direction"
    assert caller in said[2] or listener in said[1], said
    assert "cannot connect to rank 0 at 172.17.0.1:" in said[4], said
    assert "its host chose docker0: RALLYPOINT_SOCKET_IFNAME=docker0 says so" in said[4], said
    assert "found on host3: host1:29600, where the store is, does not answer" in said[5], said


def ended(process: subprocess.Popen[bytes]) -> str:
    """What it said, once it has failed."""
    out, _ = process.communicate(timeout=100)
    assert process.returncode != 0, out
    return out.decode()
