"""What is read of a node, whose worker has written its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import pytest
from tests.unit.launch.inspection.test_requests import STATUS

from rallypoint.base.job_so_far import JobEvent, JobSoFar
from rallypoint.base.json_records import to_json
from rallypoint.base.memory_file import memory_file
from rallypoint.base.trained_time import TrainedTime
from rallypoint.base.worker_hook import FLIGHT_RECORD, FLIGHT_RECORD_BYTES, FLIGHT_RECORD_NAME
from rallypoint.diagnosis.node_update import from_line, to_line
from rallypoint.launch.inspection.agent_client import AgentConnection
from rallypoint.launch.inspection.node_reader import read_agents_node, read_node
from rallypoint.launch.inspection.requests import AgentStatus

PROGRAM = """
import time, rallypoint
for step in range(5, 10):
    rallypoint.progress(step)
    time.sleep(0.01)
"""


@pytest.fixture
def memory() -> Iterator[int]:
    """The memory of the records of a worker that has done the steps from 5 to 9."""
    descriptor = memory_file(FLIGHT_RECORD_NAME, FLIGHT_RECORD_BYTES)
    environ = {**os.environ, FLIGHT_RECORD: f"{descriptor}:0"}
    command = [sys.executable, "-c", PROGRAM]
    subprocess.run(command, env=environ, pass_fds=[descriptor], check=True)
    yield descriptor
    os.close(descriptor)


def status(so_far: JobSoFar | None) -> AgentStatus:
    return STATUS.__replace__(workers=STATUS.workers[:1], so_far=so_far)


def trained_s(memory: int, so_far: JobSoFar, least_s: float = 0.0) -> float:
    found = read_node(status(so_far), [memory], least_s).so_far
    assert found is not None
    assert found.trained is not None
    return found.trained.trained_s


def test_steps_are_added_to_those_that_the_agent_knows(memory: int) -> None:
    alone = trained_s(memory, JobSoFar())
    assert alone >= 4 * 0.01
    before = TrainedTime(trained_s=100.0, steps=7, most=7)  # in processes that have ended
    after = trained_s(memory, JobSoFar(trained=before))
    assert 100 < after < 100 + alone  # steps up to 7 are done again


def test_trained_time_never_falls(memory: int) -> None:
    alone = trained_s(memory, JobSoFar())
    assert trained_s(memory, JobSoFar(), alone / 2) == alone
    assert trained_s(memory, JobSoFar(), 2 * alone) == 2 * alone


def test_it_comes_as_it_was_read(memory: int) -> None:
    events = (JobEvent(at=1.5, kind="loss", text="rank 1 \x1b\udcff", lost_s=0.5),)
    so_far = JobSoFar(events=events, losses={"killed": 1}, restarts=2)
    update = read_node(status(so_far), [memory])
    assert from_line(json.loads(to_line(update))) == update
    assert read_node(status(None), [memory]).so_far is None


class Agent:
    """Answers as one whose worker has that memory."""

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def ask(self, _: object) -> tuple[object, list[int]]:
        return to_json(status(None)), [os.dup(self._memory)]


def test_only_who_follows_a_job_has_its_workers_look_more_often(memory: int) -> None:
    before = os.pread(memory, FLIGHT_RECORD_BYTES, 0)
    agent = cast(AgentConnection, Agent(memory))
    read_agents_node(agent)
    assert os.pread(memory, FLIGHT_RECORD_BYTES, 0) == before
    read_agents_node(agent, closely=True)
    assert os.pread(memory, FLIGHT_RECORD_BYTES, 0) != before
