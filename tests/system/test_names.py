"""Names of hosts that are not known yet, or move; all hosts share one /etc/hosts."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.nodes import Agents

pytestmark = pytest.mark.system

QUICK = (
    "--rdzv-conf", "last_call_timeout=0.5,keep_alive_interval=0.3,keep_alive_max_attempt=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(4) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    names = hosts.names.read_text()
    try:
        with Agents(hosts, tmp_path) as agents:
            yield agents
    finally:
        hosts.names.write_text(names)


@pytest.mark.seldom
def test_a_name_that_nobody_knows_yet(agents: Agents) -> None:
    flags = ("--nnodes", "2", "--rdzv-endpoint", "late.example:29400", *QUICK)
    for number in (1, 2):
        agents.start(number, *flags)
    for number in (1, 2):
        agents.wait_until_said(number, "waiting for a name to resolve, for 10 s so far")
        assert agents.runs(number)
    with agents.hosts.names.open("a") as file:
        file.write("10.77.0.1 late.example\n")
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.finish((1, 2))


def test_a_name_that_nobody_ever_knows(agents: Agents) -> None:
    flags = ("--nnodes", "2", "--rdzv-endpoint", "never.example:29400")
    agents.start(2, *flags, "--rdzv-conf", "join_timeout=1.5")
    assert agents.ended(2) == 1
    assert re.search(r"after \d+ s: cannot find the host 'never\.example'", agents.said(2))


def test_an_endpoint_that_comes_back_with_another_address(agents: Agents) -> None:
    names = agents.hosts.names.read_text()
    agents.hosts.names.write_text(names + "10.77.0.1 job\n")
    flags = ("--nnodes", "2:3", "--rdzv-endpoint", "job:29400", *QUICK)
    for number in (1, 2, 3):
        agents.start(number, *flags)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(1, signal.SIGKILL)
    agents.ended(1)
    (agents.directory / "up.host1.0").unlink()
    agents.hosts.pull_cable(1)  # nothing at the old address says that it is gone
    deadline = time.monotonic() + 60
    while set(agents.up().values()) != {"1 0/2 0/2", "1 1/2 1/2"}:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.02)
    agents.hosts.names.write_text(names + "10.77.0.4 job\n")
    agents.start(4, *flags)
    deadline = time.monotonic() + 60
    while {text.split(" ", 1)[1] for text in agents.up().values()} != {
        f"{rank}/3 {rank}/3" for rank in range(3)
    }:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.02)
    agents.finish((2, 3, 4))
    agents.hosts.plug_cable(1)
