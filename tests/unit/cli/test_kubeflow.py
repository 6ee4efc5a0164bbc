"""What a TrainJob's status says, when it is sent, by a clock of the test's own, and what a server
may answer."""

from __future__ import annotations

import json
import random
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.kubeflow_server import (
    KubeflowServer,
    Request,
    is_valid_status,
    kubeflow_server,
    make_certificates,
)
from tests.unit.diagnosis.followed_job import FollowedJob

from rallypoint.base.job_so_far import JobSoFar
from rallypoint.base.recorded_steps import MOST_VALUES, NAME_BYTES
from rallypoint.cli.kubeflow import Problem, Reporter, StatusServer, train_job_status
from rallypoint.diagnosis.job_view import JobView, view_of

AT_S = 1796000000.75


def view(at_s: float = 60.0, **changes: Any) -> JobView:
    found = view_of(FollowedJob(steps=True, values={"loss": "2.31"}).history(at_s))
    assert found is not None
    return replace(found, **changes)


def status_of(body: bytes) -> dict[str, Any]:
    request = Request(0.0, "", {}, body)
    assert is_valid_status(request)
    return request.status


def metrics_of(found: JobView) -> dict[str, str]:
    told = status_of(train_job_status(found, AT_S))["metrics"]
    return {each["name"]: each["value"] for each in told}


def test_the_body_is_that_of_the_proposal() -> None:
    assert json.loads(train_job_status(view(), AT_S)) == {
        "trainerStatus": {
            "progressPercentage": 1,
            "estimatedRemainingSeconds": 4940,
            "metrics": [
                {"name": "rounds", "value": "1"},
                {"name": "losses", "value": "0"},
                {"name": "restarts", "value": "0"},
                {"name": "stalled", "value": "0"},
                {"name": "step", "value": "600"},
                {"name": "loss", "value": "2.31"},
            ],
            "lastUpdatedTime": "2026-11-30T00:53:20Z",
        }
    }


def test_what_is_not_known_is_left_out() -> None:
    found = view_of(FollowedJob().history(60.0))
    assert found is not None
    assert status_of(train_job_status(found, AT_S)).keys() == {"metrics", "lastUpdatedTime"}


@pytest.mark.parametrize(
    ("exit_status", "expected"), [(None, (99, 4940)), (0, (100, 0)), (1, (99, None))]
)
def test_only_a_job_that_has_succeeded_has_100_per_cent(
    exit_status: int | None, expected: tuple[int, int | None]
) -> None:
    found = status_of(train_job_status(view(step=50_001), AT_S, exit_status))
    assert (found["progressPercentage"], found.get("estimatedRemainingSeconds")) == expected


def test_a_slow_rank_and_a_hang_are_metrics() -> None:
    found = view_of(FollowedJob(late_s={3: 0.03}, steps=True).history(60.0))
    assert found is not None
    metrics = metrics_of(replace(found, is_stalled=True))
    assert (metrics["rank_last"], metrics["stalled"]) == ("3", "1")


def test_losses_and_restarts_are_metrics() -> None:
    so_far = JobSoFar(losses={"killed": 2, "raised": 1}, restarts=1)
    found = view_of(FollowedJob(round=3, so_far=so_far).history(60.0))
    assert found is not None
    assert metrics_of(found) == {"rounds": "4", "losses": "3", "restarts": "1", "stalled": "0"}


def test_all_that_a_record_can_hold_is_within_the_limits(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(200):
        letters = [chance.choice('a\x00\x1b\u00fc\U0001f600"\\') for _ in range(NAME_BYTES)]
        names = {
            "".join(letters[: at + 1])
            .encode()[:NAME_BYTES]
            .decode(errors="ignore"): "-1.23457e+300"
            for at in range(MOST_VALUES)
        }
        numbers: dict[str, Any] = {
            "step": chance.choice([0, 1, 2**63 - 1]),
            "total": chance.choice([None, 1, 2**63 - 1]),
            "left_s": chance.choice([None, -1, 0, 10**30]),
        }
        values = {**names, "": "1", "step": "7"}
        status_of(train_job_status(view(values=values, **numbers), AT_S))


class Server:
    """One that notes when statuses come."""

    def __init__(self) -> None:
        self.problem: Problem | None = None
        self.sent: list[float] = []
        self.now = 0.0
        self.reporter = Reporter(self.post)

    def post(self, _: bytes) -> Problem | None:
        self.sent.append(self.now)
        return self.problem

    def run(self, until_s: float, **changes: Any) -> list[float]:
        """When statuses of a job came that is looked at each second."""
        self.sent.clear()
        while self.now < until_s:
            self.reporter.report(view(**changes), self.now, AT_S)
            self.now += 1.0
        return self.sent


def test_each_30_s_and_at_news_but_never_within_5_s(seed: int) -> None:
    server = Server()
    assert server.run(70) == [0, 30, 60]
    assert server.run(100, step=1000) == [70]
    assert server.run(103, step=1000) == [100]
    assert server.run(140, step=1000, round=1) == [105, 135]
    server = Server()
    chance = random.Random(seed)
    sent = [
        at_s for end in range(1, 500) for at_s in server.run(end, step=chance.randrange(50_000))
    ]
    assert min(later - at_s for at_s, later in pairwise(sent)) == 5


def test_after_trouble_it_waits_and_says_so_once(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server()
    server.problem = Problem("500", "it answers 500\x1b[2J: " + "x" * 1000)
    assert [*server.run(20), *server.run(70, step=1000)] == [0, 30, 60]
    server.problem = Problem("timeout", "it has not answered")
    assert server.run(125, step=1000) == [90, 120]
    first, second = capsys.readouterr().err.splitlines()
    assert "but the job continues: it answers 500\\x1b[2J: xxx" in first
    assert len(first) < 300
    assert second.endswith(": it has not answered")
    server.problem = None
    assert server.run(160, step=1000) == [150]
    assert server.run(170, step=5000) == [160]


@pytest.fixture
def kubeflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeflowServer]:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    monkeypatch.setattr("rallypoint.cli.kubeflow.TIMEOUT_S", 60.0)  # however busy the machine is
    with kubeflow_server(tmp_path / "kubeflow") as server:
        yield server


def problem_of(server: KubeflowServer) -> str:
    """What is wrong with a status that is sent to it; empty if it is taken."""
    problem = StatusServer(server.url, *server.files).post(train_job_status(view(), AT_S))
    return "" if problem is None else problem.text


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        (200, ""),
        (404, "localhost answers 404, it knows no such TrainJob: as the test wants it"),
        (422, "localhost answers 422, it does not take the status: as the test wants it"),
        (500, "localhost answers 500, it does not take the status: as the test wants it"),
        (0, "localhost:{} has not answered for 0.5 s"),
        (-1, "localhost:{} has not answered for 0.5 s"),
    ],
)
def test_what_a_server_answers(
    kubeflow: KubeflowServer, monkeypatch: pytest.MonkeyPatch, answers: int, says: str
) -> None:
    if answers <= 0:
        monkeypatch.setattr("rallypoint.cli.kubeflow.TIMEOUT_S", 0.5)
    kubeflow.answers = answers
    assert problem_of(kubeflow) == says.format(kubeflow.port)


def test_files_and_servers_that_are_not_right(kubeflow: KubeflowServer) -> None:
    """Each is read anew for each status, and a token is never told."""
    authority, token = map(Path, kubeflow.files)
    right = authority.read_text()
    make_certificates(kubeflow.directory, "other")
    authority.write_text((kubeflow.directory / "other.pem").read_text())
    assert problem_of(kubeflow).endswith(": unable to get local issuer certificate")
    authority.write_text(right)
    token.unlink()
    assert problem_of(kubeflow) == f"{token}: No such file or directory"
    token.write_text("first\nsecret")
    assert problem_of(kubeflow) == f"localhost:{kubeflow.port}: ValueError"
    kubeflow.renew_token("second token")
    assert problem_of(kubeflow) == ""
    with socket.socket() as bound:  # nobody listens there
        bound.bind(("127.0.0.1", 0))
        kubeflow.port = bound.getsockname()[1]
        assert problem_of(kubeflow) == f"localhost:{kubeflow.port}: Connection refused"
