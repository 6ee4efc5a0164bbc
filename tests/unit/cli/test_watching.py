"""When commands that watch a job inspect it, and what they say of launchers that are too old."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from tests.unit.diagnosis.followed_job import FollowedJob

from rallypoint.cli.watching import Inspections
from rallypoint.diagnosis.explanation import Explanation, Verdict
from rallypoint.diagnosis.job_view import Inspection, JobView, view_of


def view(at_s: float) -> JobView:
    found = view_of(FollowedJob(stuck=(1, 30.0)).history(at_s))
    assert found is not None
    return found


def due(inspections: Inspections, first_s: int, last_s: int) -> list[int]:
    """The seconds at which an inspection begins, while the job makes no progress."""
    stalled = view(40.0)
    return [now for now in range(first_s, last_s) if inspections.is_due(stalled, now)]


def test_a_job_is_inspected_only_while_it_makes_no_progress() -> None:
    inspections = Inspections()
    assert not inspections.is_due(view(20.0), 100)
    assert due(inspections, 101, 120) == [101, 106, 111, 116]
    hang = Inspection(Explanation(kind=Verdict.EXPLAINED, sentence="why"), {})
    inspections.add(hang)
    assert inspections.latest is hang
    assert not inspections.is_due(view(20.0), 120)
    assert inspections.latest is None
    assert due(inspections, 121, 122) == [121]  # at once


def test_a_job_that_computes_is_inspected_more_and_more_rarely() -> None:
    inspections, times, now = Inspections(), [], 0
    no_hang = Inspection(Explanation(kind=Verdict.NO_HANG, sentence=""), {})
    for _ in range(6):
        while not due(inspections, now, now + 1):
            now += 1
        times.append(now)
        inspections.add(no_hang)
    # The result of the first counts from the second on.
    assert [b - a for a, b in pairwise(times)] == [5, 10, 20, 40, 60]


# An agent that knows none of the requests of those who follow a job, as the first ones.
OLD_AGENT = """
import json, socket, sys
from rallypoint.launch.inspection.entries import Entry
entry = Entry({"run_id": "old", "began": "1.5", "command": "train.py"})
status = {"run_id": "old", "host": "h", "pid": 7, "node_rank": 0, "phase": "running", "round": 0,
          "nodes": 1, "world_size": 1, "uptime_s": 3.0, "oom_kills": None, "loopback_trouble": "",
          "news": "", "workers": [{"rank": 0, "local_rank": 0, "record_slot": 0, "has_ended": True,
                                   "code": 0}]}
unknown = {"error": "this agent does not know that request; it may be an older version"}
listener = socket.socket(fileno=entry.fileno())
listener.setblocking(True)
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    for line in connection.makefile():
        known = {"status": status, "look": status, "others": {"nodes": []}}
        answer = known.get(json.loads(line)["ask"], unknown)
        connection.sendall(json.dumps(answer).encode() + b"\\n")
        if answer is not status:
            break
    connection.close()
"""


@pytest.fixture
def old_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RALLYPOINT_RUN_DIR", str(tmp_path / "agents"))
    command = [sys.executable, "-c", OLD_AGENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "ready\n"
        yield
        agent.kill()


@pytest.mark.parametrize("words", ["top", "top --json", "page", "metrics --listen 127.0.0.1:0"])
def test_an_old_launcher_is_named(old_agent: None, words: str) -> None:
    command = [sys.executable, "-m", "rallypoint", *words.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as program:
        assert program.stderr is not None
        try:
            line = next(line for line in program.stderr if "metrics are at" not in line)
        finally:
            program.terminate()
    why = "its launcher is older than this rallypoint, and cannot be followed"
    assert f"{why}; use `rallypoint status` of its version.\n" in line
    command = [sys.executable, "-m", "rallypoint", "status"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "job old: round 0, 1 ranks on 1 node" in shown
    assert "ended with 0" in shown
