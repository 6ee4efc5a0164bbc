"""Jobs on several hosts that find each other, lose each other, and go on.

Which rounds there are, whoever comes or goes, is told in tests/scenarios and tests/simulation: here
are the sockets, processes and signals.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.nodes import Agents

from rallypoint.rendezvous.timeouts import Timeouts

pytestmark = pytest.mark.system

QUICK = ("--rdzv-conf", "last_call_timeout=0.5")
# Where as many come as can take part: then the last call costs nothing, however slow one is.
FULL = ("--rdzv-conf", "last_call_timeout=60")


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(5) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        yield agents


def start_three(agents: Agents, nodes: str = "2:3", *flags: str) -> None:
    """Form a round of hosts 1 to 3."""
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", nodes, *FULL, *flags)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})


@pytest.mark.everyday
def test_form_with_nodes_of_different_sizes(agents: Agents) -> None:
    for number, workers in ((3, 1), (1, 2), (2, 3)):
        agents.start(number, "--nnodes", "3", workers=workers)
    agents.wait_for(
        {
            **{f"host1.{i}": f"0 {i}/6 0/3" for i in range(2)},
            **{f"host2.{i}": f"0 {2 + i}/6 1/3" for i in range(3)},
            "host3.0": "0 5/6 2/3",
        }
    )
    agents.finish((1, 2, 3))


@pytest.mark.everyday
def test_grow_from_two_to_four(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2:4", *QUICK)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.start(3, "--nnodes", "2:4", *QUICK)
    agents.wait_for({f"host{i}.0": f"1 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.start(4, "--nnodes", "2:4", *QUICK)
    agents.wait_for({f"host{i}.0": f"2 {i - 1}/4 {i - 1}/4" for i in (1, 2, 3, 4)})
    agents.finish((1, 2, 3, 4))


@pytest.mark.everyday
def test_one_that_comes_late_waits_for_a_place_and_is_told_the_end(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2", "--verbose")
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.start(3, "--nnodes", "2")
    agents.wait_until_said(1, "host3 joined, and waits for the next round")
    assert agents.runs(3)
    assert agents.up().keys() == {"host1.0", "host2.0"}
    agents.finish((1, 2))
    assert agents.ended(3) == 3
    assert "the job ended before this node could take part" in agents.said(3)


@pytest.mark.everyday
def test_a_killed_agent_is_lost_at_once_and_the_others_go_on(agents: Agents) -> None:
    """By the end of its connection, long before its lease is over."""
    start_three(agents)
    agents.send(2, signal.SIGKILL)
    agents.wait_for({"host1.0": "1 0/2 0/2", "host3.0": "1 1/2 1/2"})
    assert "node 1 (host2) was lost: its connection closed" in agents.said(1)
    assert "silent" not in agents.story()
    agents.finish((1, 3))


@pytest.mark.alone  # for its agents to run when their leases are to be renewed
def test_a_node_that_falls_silent_is_noticed_within_its_lease_of_5_s(agents: Agents) -> None:
    """The job goes on without it, and with it when it can be reached again."""
    start_three(agents)
    agents.hosts.pull_cable(3)
    took_s = agents.wait_for({"host1.0": "1 0/2 0/2", "host2.0": "1 1/2 1/2"})
    # It may have been heard of for the last time a heartbeat before.
    timeouts = Timeouts()
    assert timeouts.silence_s == 5
    assert timeouts.silence_s - timeouts.heartbeat_s < took_s < timeouts.silence_s + 5, (
        agents.story()
    )
    agents.wait_until_said(3, "the coordinator was silent for 5 s")
    agents.hosts.plug_cable(3)
    # It comes back as a newcomer, to a new round.
    agents.wait_for({f"host{i}.0": f"2 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.finish((1, 2, 3))


@pytest.mark.everyday
def test_a_signal_to_one_agent_is_a_leave(agents: Agents) -> None:
    start_three(agents)
    agents.send(3, signal.SIGTERM)
    agents.wait_for({"host1.0": "1 0/2 0/2", "host2.0": "1 1/2 1/2"})
    assert agents.ended(3) == 128 + signal.SIGTERM
    assert "node 2 (host3) leaves: SIGTERM stopped node 2" in agents.said(1)
    agents.finish((1, 2))


def test_all_but_one_may_leave(agents: Agents) -> None:
    """Also the one that coordinates, which has 2 s to agree on that with the last one."""
    for number in (1, 2):
        agents.start(number, "--nnodes", "1:2", *FULL)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.send(1, signal.SIGTERM)
    agents.wait_for({"host2.0": "1 0/1 0/1"})
    assert agents.ended(1) == 128 + signal.SIGTERM
    agents.finish((2,))


@pytest.mark.everyday
def test_ctrl_c_on_one_node_ends_the_job(agents: Agents) -> None:
    start_three(agents)
    agents.send(2, signal.SIGINT)
    assert agents.ended(2) == 128 + signal.SIGINT
    for number in (1, 3):
        assert agents.ended(number) == 1
        assert "SIGINT stopped node 1" in agents.said(number)


@pytest.mark.everyday
def test_the_endpoints_host_dies_and_the_others_go_on(agents: Agents) -> None:
    start_three(agents)
    agents.send(1, signal.SIGKILL)
    newest = agents.wait_for_size((2, 3), after=0)
    # One that is started again there knows of nothing, and is taken in by its successor.
    agents.ended(1)
    agents.start(1, "--nnodes", "2:3", *FULL)
    agents.wait_for_size((1, 2, 3), after=newest)
    agents.finish((1, 2, 3))


def test_three_endpoints_need_no_host(agents: Agents) -> None:
    """With three endpoints, two of them begin the job, and newcomers find it at any of them."""
    flags = ("--nnodes", "2:4", "--rdzv-endpoint", "host1:29400,host2:29400,host3:29400", *QUICK)
    for number in (2, 3):
        agents.start(number, *flags)
    newest = agents.wait_for_size((2, 3))
    agents.start(4, *flags)
    newest = agents.wait_for_size((2, 3, 4), after=newest)
    agents.send(2, signal.SIGKILL)
    agents.ended(2)
    agents.start(1, *flags)
    agents.wait_for_size((1, 3, 4), after=newest)
    agents.finish((1, 3, 4))


def test_ipv6_only_endpoint(agents: Agents) -> None:
    start_three(agents, "2:3", "--rdzv-endpoint", f"[{agents.hosts[1].address_6}]:29400")
    agents.send(1, signal.SIGKILL)
    agents.wait_for_size((2, 3), after=0)
    agents.finish((2, 3))


def test_with_quorum_host_the_job_does_not_outlive_it(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", "--rdzv-conf", "last_call_timeout=60,quorum=host")
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(1, signal.SIGKILL)
    for number in (2, 3):
        assert agents.ended(number) == 1
        assert "with quorum=host the job ends with it" in agents.said(number)


@pytest.mark.everyday
def test_wrong_token_run_id_and_number_of_nodes(agents: Agents) -> None:
    agents.start(1, "--nnodes", "2", "--node-rank", "1")
    agents.start(2, "--nnodes", "2", token="other")
    agents.start(3, "--nnodes", "2", "--rdzv-id", "another")
    agents.start(4, "--nnodes", "3")
    assert [agents.ended(number) for number in (2, 3, 4)] == [1, 1, 1]
    assert "it has a different token; set the same RALLYPOINT_TOKEN" in agents.said(2)
    assert agents.said(1).count("refused a node from ") == 1
    assert "the job is 'j', not 'another'; pass the same --rdzv-id" in agents.said(3)
    assert "--nnodes is 2:2 in the job but 3:3 on this node" in agents.said(4)
    agents.start(5, "--nnodes", "2")  # none of them took a place
    agents.wait_for({"host5.0": "0 0/2 0/2", "host1.0": "0 1/2 1/2"})
    agents.finish((1, 5))


def test_nobody_at_the_endpoint(agents: Agents) -> None:
    agents.start(2, "--nnodes", "2", "--rdzv-conf", "join_timeout=1")
    assert agents.ended(2) == 1
    assert "no coordinator found (host1:29400: it does not answer" in agents.said(2)


@pytest.mark.everyday
def test_a_failure_restarts_all_nodes_once(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "1:2", "--max-restarts", "1", *FULL)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.kill_worker(2)
    agents.wait_for({"host1.0": "1 0/2 0/2", "host2.0": "1 1/2 1/2"})
    agents.wait_until_said(2, "restart 1 of 1")
    agents.kill_worker(1)
    assert (agents.ended(1), agents.ended(2)) == (1, 1)
    assert "all 1 restarts are used up" in agents.said(1)
