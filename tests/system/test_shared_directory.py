"""Agents on several hosts that find each other by a directory: they begin one job, and keep it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.everyday import wait_until
from tests.system.nodes import Agents

pytestmark = pytest.mark.system

# Who calls in vain for twice the silence, 1.2 s, may begin the job.
CONF = "last_call_timeout=0.5,keep_alive_interval=0.3,keep_alive_max_attempt=4"


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(4) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        meeting = f"file://{tmp_path}/meeting"
        agents.flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "j"]
        yield agents


def files(agents: Agents, kind: str) -> list[Path]:
    return sorted((agents.directory / "meeting").glob(f"{kind}.*"))


@pytest.mark.everyday
@pytest.mark.repeated
def test_all_that_start_at_once_begin_one_job(agents: Agents) -> None:
    for number in (1, 2, 3, 4):
        agents.start(number, "--nnodes", "4", "--node-rank", str(number - 1))
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/4 {i - 1}/4" for i in (1, 2, 3, 4)})
    assert [path.name for path in files(agents, "founder")] == ["founder.0"], agents.story()
    assert len(files(agents, "agent")) == 4
    agents.finish((1, 2, 3, 4))


def test_any_may_be_lost_and_is_replaced(agents: Agents) -> None:
    """Also the one that began the job; as tasks of an array that are killed and requeued."""
    flags = ("--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=1")
    for number in (1, 2, 3):
        agents.start(number, *flags)
    newest = agents.wait_for_size((1, 2, 3))
    for lost, left in ((1, (2, 3)), (2, (1, 3)), (3, (1, 2))):
        assert agents.end_all(lost) == []
        newest = agents.wait_for_size(left, after=newest)
        agents.start(lost, *flags)
        newest = agents.wait_for_size((1, 2, 3), after=newest)
    assert [path.name for path in files(agents, "founder")] == ["founder.0"]
    assert len(files(agents, "agent")) == 6  # of three that were killed, too
    agents.finish((1, 2, 3))


def test_who_began_the_job_and_was_lost_at_once_is_replaced(agents: Agents) -> None:
    flags = ("--nnodes", "2", "--rdzv-conf", CONF)
    agents.start(1, *flags)
    wait_for_files(agents, "founder", 1)
    assert agents.end_all(1) == []
    for number in (2, 3):
        agents.start(number, *flags)
    agents.wait_for({"host2.0": "0 0/2 0/2", "host3.0": "0 1/2 1/2"})
    assert [path.name for path in files(agents, "founder")] == ["founder.0", "founder.1"]
    agents.finish((2, 3))


@pytest.mark.parametrize("founder", [1, 2])
def test_of_two_the_one_that_is_left_goes_on_with_a_new_one(agents: Agents, founder: int) -> None:
    """Node 0's host is lost, and nobody may go on alone; whoever comes begins the job anew.

    Also where it had come before the other one, which began the job, found that it is too few.
    """
    flags = ("--nnodes", "2", "--rdzv-conf", CONF)
    agents.start(founder, *flags, "--node-rank", str(founder - 1))
    wait_for_files(agents, "founder", 1)
    other = 3 - founder
    agents.start(other, *flags, "--node-rank", str(other - 1))
    agents.wait_for_size((1, 2))
    assert agents.end_all(1) == []
    agents.start(3, *flags)
    agents.wait_for_size((2, 3))
    agents.finish((2, 3))


def test_two_jobs_of_one_name_become_one_when_they_meet(agents: Agents) -> None:
    flags = ("--nnodes", "1:3", "--rdzv-conf", CONF)
    agents.start(1, *flags)
    agents.wait_for_size((1,))
    agents.hosts.partition([1], [2])
    agents.start(2, *flags)
    agents.wait_for_size((2,))
    agents.hosts.heal()
    agents.wait_for_size((1, 2), after=0)
    agents.finish((1, 2))


def test_another_job_in_the_directory_is_named(agents: Agents) -> None:
    agents.start(1, "--nnodes", "2", "--rdzv-id", "other")
    wait_for_files(agents, "founder", 1)
    agents.start(2, "--nnodes", "2")
    assert agents.ended(2) == 1
    assert "the job is 'other', not 'j'; pass the same --rdzv-id" in agents.said(2)


@pytest.mark.seldom
def test_another_token_waits_and_says_what_may_be_wrong(agents: Agents) -> None:
    agents.start(1, "--nnodes", "2")
    wait_for_files(agents, "founder", 1)
    agents.start(2, "--nnodes", "2", "--rdzv-conf", "join_timeout=2", token="another")
    assert agents.ended(2) == 1
    assert "none of the 1 agents with an address there answers" in agents.said(2)
    assert "use the same --rdzv-id and RALLYPOINT_TOKEN" in agents.said(2)
    agents.start(3, "--nnodes", "2", "--rdzv-conf", f"{CONF},join_timeout=4", token="another")
    assert agents.ended(3) == 1
    assert "starting the job again: none of " in agents.said(3)


def test_a_node_that_leaves_takes_its_address_along(agents: Agents) -> None:
    flags = ("--nnodes", "1:2", "--rdzv-conf", CONF)
    for number in (1, 2):
        agents.start(number, *flags)
    newest = agents.wait_for_size((1, 2))
    agents.send(1, signal.SIGTERM)
    assert agents.ended(1) == 143
    agents.wait_for_size((2,), after=newest)
    assert len(files(agents, "agent")) == 1
    agents.finish((2,))
    assert list((agents.directory / "meeting").iterdir()) == []  # for the next job


def test_a_directory_that_cannot_be_used(agents: Agents) -> None:
    agents.start(1, "--nnodes", "2", "--rdzv-endpoint", "file:///proc/run")
    assert agents.ended(1) == 1
    assert "cannot use the directory /proc/run of --rdzv-endpoint" in agents.said(1)


def wait_for_files(agents: Agents, kind: str, count: int) -> None:
    wait_until(lambda: len(files(agents, kind)) >= count)
