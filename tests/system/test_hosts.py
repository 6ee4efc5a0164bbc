"""The test hosts themselves: they are apart, faults are faults, and nothing stays."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts

from rallypoint.base.files import host_identity

pytestmark = pytest.mark.system


@pytest.fixture
def three(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(3) as hosts:
        yield hosts


def reaches(hosts: Hosts, source: int, target: int) -> bool:
    """By datagrams."""
    receiver = hosts[target].popen(
        [sys.executable, "-c", RECEIVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert receiver.stdin is not None
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == b"bound\n"
    hosts[source].run(sys.executable, "-c", SEND, hosts[target].address)
    receiver.stdin.close()
    told = receiver.stdout.read()
    receiver.stdout.close()
    receiver.wait()
    return told == b"got\n"


RECEIVE = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("", 7777)); s.setblocking(False); print("bound", flush=True)
    sys.stdin.read()  # until the sender has ended
    try:
        s.recv(10); print("got")
    except BlockingIOError:
        pass
"""
SEND = """
import socket, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    for _ in range(30):  # for longer than the second between two questions of ARP's
        try: s.sendto(b"x", (sys.argv[1], 7777))
        except OSError: pass
        time.sleep(0.04)
"""


def test_processes_of_different_hosts_have_different_identities(three: Hosts) -> None:
    """By which ranks learn whether they can share memory."""
    code = "from rallypoint.base.files import host_identity; print(host_identity())"
    told = [three[number].run(sys.executable, "-c", code) for number in (1, 1, 2, 3)]
    assert len({*told, f"{host_identity()}\n"}) == 4


def test_hosts_have_names_addresses_and_nothing_else(three: Hosts) -> None:
    here = os.uname().nodename
    for host in three.hosts:
        assert host.run("hostname").strip() == host.name
        assert host.run("ls", "/dev/shm") == ""
        assert "host3" in host.run("getent", "hosts", "host3")
        lines = host.run("ip", "-brief", "link").splitlines()
        assert sorted(line.split()[0].partition("@")[0] for line in lines) == ["eth0", "lo"]
    assert os.uname().nodename == here
    assert reaches(three, 1, 2)


def test_the_address_towards_another_host(three: Hosts) -> None:
    code = (
        "from rallypoint.cluster.network import choose_network\n"
        "from rallypoint.cluster.network import is_here\n"
        "print(*(choose_network([each], {}).address for each in ('host1', '10.77.0.3')))\n"
        "print(is_here('host2'), is_here('host1'))"
    )
    assert three[2].run(sys.executable, "-c", code) == "10.77.0.2 10.77.0.2\nTrue False\n"


def test_a_pulled_cable_and_a_partition(three: Hosts) -> None:
    three.pull_cable(2)
    assert not reaches(three, 1, 2)
    assert reaches(three, 1, 3)
    three.plug_cable(2)
    assert reaches(three, 1, 2)
    three.partition([1, 2], [3])
    assert reaches(three, 1, 2)
    assert not reaches(three, 1, 3)
    assert not reaches(three, 3, 2)
    three.heal()
    assert reaches(three, 3, 1)


def test_a_killed_host_leaves_nothing(three: Hosts) -> None:
    process = three[1].popen(["sh", "-c", "sleep 7771 & setsid sleep 7772 & exec sleep 7773"])
    found: list[str] = []
    while len(found) < 3:
        found = [
            entry.name
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and is_sleeping(entry)
        ]
    three[1].kill()
    process.wait(60)
    assert [pid for pid in found if is_sleeping(Path("/proc") / pid)] == []
    assert reaches(three, 2, 3)


def is_sleeping(entry: Path) -> bool:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[:1] == [b"sleep"] and words[1] in (b"7771", b"7772", b"7773")


def test_the_machines_own_network_is_untouched(three: Hosts) -> None:
    names = [name for _, name in socket.if_nameindex()]
    assert not [name for name in names if name.startswith(("port", "br0"))]
