"""Launches on several hosts that are told nothing by flags: they read where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.everyday import PATIENT
from tests.system.nodes import Agents

pytestmark = pytest.mark.system


def slurm(number: int, step: int = 0) -> dict[str, str]:
    """As srun gives them to the task on that host, of three."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": str(step),
        "SLURM_STEP_NODELIST": "host[1-3]",
        "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
        "SLURM_NODEID": str(number - 1),
    }


def leader_worker_set(number: int) -> dict[str, str]:
    return {
        "LWS_LEADER_ADDRESS": "host1",
        "LWS_GROUP_SIZE": "3",
        "LWS_WORKER_INDEX": str(number - 1),
    }


@pytest.fixture
def agents(needs_hosts: None, tmp_path: Path) -> Iterator[Agents]:
    with Hosts(3) as hosts, Agents(hosts, tmp_path) as agents:
        agents.flags = []
        yield agents


@pytest.mark.parametrize(
    "environ_of", [pytest.param(slurm, marks=pytest.mark.everyday), leader_worker_set]
)
def test_all_nodes_meet_without_a_flag(
    agents: Agents, environ_of: Callable[[int], dict[str, str]]
) -> None:
    for number in (3, 1, 2):
        agents.start(number, environ={**environ_of(number), "PET_RDZV_CONF": PATIENT})
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    assert "node 1 of 3, rendezvous at host1:" in agents.said(2)
    assert "--on here ignores this" in agents.said(2)
    agents.finish((1, 2, 3))


def test_a_step_outlives_its_first_node(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", environ=slurm(number))
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    assert agents.end_all(1) == []
    agents.wait_for({"host2.0": "1 1/2 1/2", "host3.0": "1 0/2 0/2"})
    agents.finish((2, 3))
