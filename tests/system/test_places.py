"""Launches on several hosts that are told nothing by flags: they read where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.nodes import Agents

from rallypoint.testing.hosts import Hosts

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


@pytest.mark.parametrize("environ_of", [slurm, leader_worker_set])
def test_all_nodes_meet_without_a_flag(agents: Agents, environ_of: type) -> None:
    for number in (3, 1, 2):
        agents.start(number, environ=environ_of(number), workers=2)
    agents.wait_for(
        {f"host{i}.{j}": f"0 {2 * (i - 1) + j}/6 {i - 1}/3" for i in (1, 2, 3) for j in (0, 1)}
    )
    assert "node 1 of 3, meeting at host1:" in agents.said(2)
    assert "--on here ignores this" in agents.said(2)
    agents.finish((1, 2, 3))


def test_a_step_outlives_its_first_node(agents: Agents) -> None:
    for number in (1, 2, 3):
        agents.start(number, "--nnodes", "2:3", environ=slurm(number))
    agents.wait_for({f"host{i}.0": f"0 {i - 1}/3 {i - 1}/3" for i in (1, 2, 3)})
    assert agents.end_all(1) == []
    agents.wait_for({"host2.0": "1 1/2 1/2", "host3.0": "1 0/2 0/2"})
    agents.finish((2, 3))


def test_wrong_surroundings_end_at_once(tmp_path: Path) -> None:
    for environ, expected in (
        ({**slurm(1), "SLURM_STEP_NODELIST": "host[1-"}, "SLURM_STEP_NODELIST is 'host[1-'"),
        ({**slurm(1), "SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "srun --ntasks-per-node=1"),
        ({**slurm(1), "SLURM_NODEID": ""}, "SLURM_NODEID is not set"),
    ):
        for command in (["run", "-m", "this"], ["where"]):
            done = subprocess.run(
                [sys.executable, "-m", "rallypoint", *command],
                env={**os.environ, **environ},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=20,
                check=False,
            )
            said = done.stderr + done.stdout
            assert expected in said
            assert done.stderr.count("\n") <= 1
            assert done.returncode == (0 if done.stdout else 2)


def test_a_worker_that_launches_is_no_node_of_the_step(tmp_path: Path) -> None:
    """It has inherited the variables of its launcher's step."""
    (tmp_path / "inner.py").write_text("import os; print(os.environ['WORLD_SIZE'])")
    run = [sys.executable, "-m", "rallypoint", "run"]
    outer = ["--on", "here", "--no-python", *run, "inner.py"]
    done = subprocess.run(
        [*run, *outer],
        env={**os.environ, **slurm(1)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
