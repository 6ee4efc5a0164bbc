"""Jobs on several hosts that find each other, lose each other, and go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.system.nodes import Agents

from rallypoint.testing.hosts import Hosts

pytestmark = pytest.mark.system

QUICK = ("--rdzv-conf", "last_call_timeout=0.5")
# 1.5 s of silence are a death: only where that is what is tested, as a busy machine is silent too.
WATCHFUL = (
    "--rdzv-conf", "last_call_timeout=0.5,keep_alive_interval=0.3,keep_alive_max_attempt=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(5) as hosts:
        yield hosts


@pytest.fixture
def agents(hosts: Hosts, tmp_path: Path) -> Iterator[Agents]:
    with Agents(hosts, tmp_path) as agents:
        yield agents


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


def test_grow_from_two_to_four(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2:4", *QUICK)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.start(3, "--nnodes", "2:4", *QUICK)
    agents.wait_for({f"host{i}.0": f"1 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.start(4, "--nnodes", "2:4", *QUICK)
    agents.wait_for({f"host{i}.0": f"2 {i - 1}/4 {i - 1}/4" for i in (1, 2, 3, 4)})
    agents.finish((1, 2, 3, 4))


def test_one_that_comes_late_waits_for_a_place_and_is_told_the_end(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2", "--verbose", *QUICK)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.start(3, "--nnodes", "2", *QUICK)
    agents.wait_until_said(1, "host3 joined, and waits for the next round", within_s=30)
    assert agents.runs(3)
    assert agents.up().keys() == {"host1.0", "host2.0"}
    agents.finish((1, 2))
    assert agents.ended(3) == 3
    assert "the job ended before this node had a place in it" in agents.said(3)


def test_shrink_by_a_killed_agent(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", *QUICK)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(2, signal.SIGKILL)
    took_s = agents.wait_for({"host1.0": "1 0/2 0/2", "host3.0": "1 1/2 1/2"})
    assert took_s < SOON_S
    assert "node 1 (host2) lost" in agents.said(1)
    agents.finish((1, 3))


def test_a_pulled_cable_is_noticed_by_silence(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", *WATCHFUL)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.hosts.pull_cable(3)
    agents.wait_for({"host1.0": "1 0/2 0/2", "host2.0": "1 1/2 1/2"})
    agents.wait_until_said(3, "the coordinator was silent for 1.5 s")
    agents.hosts.plug_cable(3)
    # It comes back as a newcomer, to a new round.
    agents.wait_for({f"host{i}.0": f"2 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.finish((1, 2, 3))


def test_a_partition_leaves_one_job_and_heals(agents: Agents) -> None:
    """The larger side goes on, although the coordinator is on the other one, which waits."""
    for number in range(1, 6):
        agents.start(number, "--nnodes", "2:5", *WATCHFUL)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/5 {i - 1}/5" for i in range(1, 6)})
    agents.hosts.partition([1, 2], [3, 4, 5])
    deadline = time.monotonic() + 60
    while {agents.up()[f"host{i}.0"] for i in (3, 4, 5)} != {f"1 {i}/3 {i}/3" for i in range(3)}:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.05)
    assert agents.up()["host1.0"] == "0 0/5 0/5"
    assert agents.up()["host2.0"] == "0 1/5 1/5"
    agents.wait_until_said(1, "no longer coordinates: no quorum answered")
    agents.hosts.heal()
    deadline = time.monotonic() + 60
    while {text.split(" ", 1)[1] for text in agents.up().values()} != {
        f"{rank}/5 {rank}/5" for rank in range(5)
    }:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.05)
    agents.finish(range(1, 6))


def test_a_signal_to_one_agent_is_a_leave(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "1:3", *QUICK)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(3, signal.SIGTERM)
    assert agents.wait_for({"host1.0": "1 0/2 0/2", "host2.0": "1 1/2 1/2"}) < SOON_S
    assert agents.ended(3) == 128 + signal.SIGTERM
    assert "node 2 (host3) leaves: SIGTERM stopped node 2" in agents.said(1)
    # The one at the endpoint, which coordinates, may leave as well.
    agents.send(1, signal.SIGTERM)
    assert agents.wait_for({"host2.0": "2 0/1 0/1"}) < SOON_S
    assert agents.ended(1) == 128 + signal.SIGTERM
    agents.finish((2,))


def test_ctrl_c_on_one_node_ends_the_job(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", *QUICK)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(2, signal.SIGINT)
    assert agents.ended(2, within_s=5) == 128 + signal.SIGINT
    for number in (1, 3):
        assert agents.ended(number, within_s=5) == 1
        assert "SIGINT stopped node 1" in agents.said(number)


def test_the_coordinator_is_started_again(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "2", *QUICK)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.send(1, signal.SIGKILL)
    agents.ended(1)
    agents.start(1, "--nnodes", "2", *QUICK)
    # Rounds only grow, also under a new coordinator.
    agents.wait_for({"host1.0": "1 0/2 0/2", "host2.0": "1 1/2 1/2"})
    agents.finish((1, 2))


def test_the_endpoints_host_dies_and_the_others_go_on(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", *QUICK)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(1, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while {agents.up()[f"host{i}.0"] for i in (2, 3)} != {"1 0/2 0/2", "1 1/2 1/2"}:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.02)
    # One that is started again there knows of nothing, and is taken in by its successor.
    agents.ended(1)
    agents.start(1, "--nnodes", "2:3", *QUICK)
    deadline = time.monotonic() + 60
    while {text.split(" ", 1)[1] for text in agents.up().values()} != {
        f"{rank}/3 {rank}/3" for rank in range(3)
    }:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.02)
    agents.finish((1, 2, 3))


def test_of_two_the_first_goes_on_and_the_second_waits(agents: Agents) -> None:
    conf = ("--rdzv-conf", "last_call_timeout=0.5,join_timeout=3")
    for number in (1, 2):
        agents.start(number, "--nnodes", "1:2", *conf)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.send(2, signal.SIGKILL)
    agents.wait_for({"host1.0": "1 0/1 0/1"})
    agents.ended(2)
    agents.start(2, "--nnodes", "1:2", *conf)
    agents.wait_for({"host1.0": "2 0/2 0/2", "host2.0": "2 1/2 1/2"})
    agents.send(1, signal.SIGKILL)
    assert agents.ended(2) == 1
    assert "the coordinator was lost: its connection" in agents.said(2)
    assert "too few to continue; of two equal halves, the one with host1 goes on" in agents.said(2)


def test_three_endpoints_need_no_host(agents: Agents) -> None:
    """With three endpoints, two of them begin the job, and newcomers find it at any of them."""
    flags = ("--nnodes", "2:4", "--rdzv-endpoint", "host1:29400,host2:29400,host3:29400", *QUICK)
    for number in (2, 3):
        agents.start(number, *flags)
    agents.wait_for({"host2.0": "0 0/2 0/2", "host3.0": "0 1/2 1/2"})
    agents.start(4, *flags)
    agents.wait_for({f"host{i}.0": f"1 {i - 2}/3 {i - 2}/3" for i in (2, 3, 4)})
    agents.send(2, signal.SIGKILL)
    agents.ended(2)
    agents.start(1, *flags)
    deadline = time.monotonic() + 60
    while {agents.up().get(f"host{i}.0", "0 x").split(" ", 1)[1] for i in (1, 3, 4)} != {
        f"{rank}/3 {rank}/3" for rank in range(3)
    }:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.02)
    agents.finish((1, 3, 4))


def test_ipv6_only_endpoint(agents: Agents) -> None:
    flags = ("--nnodes", "2:3", "--rdzv-endpoint", f"[{agents.hosts[1].address_6}]:29400", *QUICK)
    for number in (1, 2, 3):
        agents.start(number, *flags)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(1, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while {agents.up()[f"host{i}.0"] for i in (2, 3)} != {"1 0/2 0/2", "1 1/2 1/2"}:
        assert time.monotonic() < deadline, agents.story()
        time.sleep(0.02)
    agents.finish((2, 3))


def test_with_quorum_host_the_job_does_not_outlive_it(agents: Agents) -> None:
    conf = ("--rdzv-conf", "last_call_timeout=0.5,quorum=host")
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", *conf)
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    agents.send(1, signal.SIGKILL)
    for number in (2, 3):
        assert agents.ended(number) == 1
        assert "with quorum=host the job ends with it" in agents.said(number)


def test_wrong_token_run_id_and_number_of_nodes(agents: Agents) -> None:
    agents.start(1, "--nnodes", "2")
    agents.start(2, "--nnodes", "2", token="other")
    assert agents.ended(2) == 1
    assert "it has a different token; set the same RALLYPOINT_TOKEN" in agents.said(2)
    agents.start(3, "--nnodes", "2", "--rdzv-id", "another")
    assert agents.ended(3) == 1
    assert "the job is 'j', not 'another'; pass the same --rdzv-id" in agents.said(3)
    agents.start(4, "--nnodes", "3")
    assert agents.ended(4) == 1
    assert "--nnodes is 2:2 in the job but 3:3 on this node" in agents.said(4)
    agents.start(5, "--nnodes", "2")  # none of them took a place
    agents.wait_for({"host1.0": "0 0/2 0/2", "host5.0": "0 1/2 1/2"})
    agents.finish((1, 5))


def test_node_ranks_are_honoured_and_not_given_twice(agents: Agents) -> None:
    agents.start(1, "--nnodes", "3", "--node-rank", "2")
    agents.start(2, "--nnodes", "3", "--node-rank", "0")
    deadline = time.monotonic() + 10
    while agents.said(2) == "" and time.monotonic() < deadline - 8:
        time.sleep(0.05)
    agents.start(3, "--nnodes", "3", "--node-rank", "0")
    assert agents.ended(3) == 1
    assert "node rank 0 is taken by host 'host2'; this is 'host3'" in agents.said(3)
    agents.start(4, "--nnodes", "3")
    agents.wait_for({"host1.0": "0 2/3 2/3", "host2.0": "0 0/3 0/3", "host4.0": "0 1/3 1/3"})
    agents.finish((1, 2, 4))


def test_too_few_nodes(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "3:4", "--rdzv-conf", "join_timeout=1.5")
    for number in (1, 2):
        assert agents.ended(number) == 1
        assert "2 of at least 3 nodes joined (host1, host2); missing 1" in agents.said(number)
        assert "after 1.5 s; start it there" in agents.said(number)


def test_nobody_at_the_endpoint(agents: Agents) -> None:
    agents.start(2, "--nnodes", "2", "--rdzv-conf", "join_timeout=1")
    assert agents.ended(2) == 1
    assert "no coordinator found (host1:29400: it does not answer" in agents.said(2)


def test_a_failure_restarts_all_nodes_once(agents: Agents) -> None:
    for number in (1, 2):
        agents.start(number, "--nnodes", "1:2", "--max-restarts", "1", *QUICK)
    agents.wait_for({"host1.0": "0 0/2 0/2", "host2.0": "0 1/2 1/2"})
    agents.kill_worker(2)
    agents.wait_for({"host1.0": "1 0/2 0/2", "host2.0": "1 1/2 1/2"})
    agents.wait_until_said(2, "restart 1 of 1")
    agents.kill_worker(1)
    assert (agents.ended(1), agents.ended(2)) == (1, 1)
    assert "all 1 restarts are used up" in agents.said(1)
