"""The status of a TrainJob, from real jobs to a server with a certificate authority of its own."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kubeflow_server import KubeflowServer, kubeflow_server
from tests.system.conftest import Launch
from tests.system.everyday import wait_until

pytestmark = pytest.mark.system

# A step each 20 ms until there is the file "stop", and the last ones after that.
TELLS = """
import os, time, rallypoint
step = 0
while not os.path.exists("stop"):
    step = min(step + 1, 990)
    rallypoint.progress(step, 1000, loss=2.5, **{"": 1, "\\u00fc" * 16: float("nan")})
    time.sleep(0.02)
rallypoint.progress(1000, 1000, loss=0.25)
time.sleep(1.5)
"""
SILENT = "import os, time\nwhile not os.path.exists('stop'): time.sleep(0.02)\n"
FAILS = TELLS + "raise SystemExit(3)\n"
SENTENCE = "rallypoint run: Kubeflow does not learn this job's progress, but the job continues: "


@pytest.fixture
def kubeflow(tmp_path: Path) -> Iterator[KubeflowServer]:
    with kubeflow_server(tmp_path / "kubeflow") as server:
        yield server


def start(
    launch: Launch, kubeflow: KubeflowServer, *flags: str, script: str = TELLS
) -> subprocess.Popen[bytes]:
    words = ("--nproc-per-node", "2", *flags, launch.script(script))
    return launch.start(*words, environ=kubeflow.environ)


def stop(launch: Launch, process: subprocess.Popen[bytes]) -> int:
    (launch.directory / "stop").touch()
    return process.wait(60)


def metrics_of(status: dict[str, object]) -> dict[str, str]:
    metrics = status["metrics"]
    assert isinstance(metrics, list)
    return {each["name"]: each["value"] for each in metrics}


def test_progress_while_it_runs_and_at_the_end(launch: Launch, kubeflow: KubeflowServer) -> None:
    began = time.monotonic()
    process = start(launch, kubeflow)
    wait_until(lambda: len(kubeflow.requests) == 1)
    kubeflow.renew_token("second token\n")
    kubeflow.token = "second token"
    wait_until(lambda: len(kubeflow.requests) == 3)  # the share of the steps changes all the time
    assert stop(launch, process) == 0
    assert len(kubeflow.requests) <= 2 + (time.monotonic() - began) / 5
    first, second, *_, last = kubeflow.requests
    assert first.headers["authorization"] == "Bearer first token"
    assert second.headers["authorization"] == "Bearer second token"
    assert launch.err == ""  # all were accepted, which the server checks
    assert 0 < first.status["progressPercentage"] < second.status["progressPercentage"] < 100
    told = metrics_of(first.status)
    assert 0 < int(told.pop("step")) < 1000
    assert told == {
        "rounds": "1", "losses": "0", "restarts": "0", "stalled": "0",
        "loss": "2.5", "\u00fc" * 16: "nan",
    }  # fmt: skip
    assert last.status["progressPercentage"] == 100
    assert last.status["estimatedRemainingSeconds"] == 0
    assert int(metrics_of(last.status)["step"]) > int(metrics_of(second.status)["step"])


def test_a_job_that_fails_never_has_100_per_cent(launch: Launch, kubeflow: KubeflowServer) -> None:
    process = start(launch, kubeflow, script=FAILS)
    wait_until(lambda: len(kubeflow.requests) == 1)
    assert stop(launch, process) == 1
    last = kubeflow.requests[-1].status
    assert last["progressPercentage"] == 99
    assert "estimatedRemainingSeconds" not in last


def test_what_goes_wrong_is_told_once(launch: Launch, kubeflow: KubeflowServer) -> None:
    """The job goes on, and what is reported after the trouble has passed is taken."""
    kubeflow.answers = 403
    process = start(launch, kubeflow)
    wait_until(lambda: SENTENCE in launch.err)
    kubeflow.answers = 200
    kubeflow.requests.clear()
    assert stop(launch, process) == 0
    refused = "localhost answers 403, it refuses the token of this job: as the test wants it"
    assert launch.err == f"{SENTENCE}{refused}\n"
    assert [each.status["progressPercentage"] for each in kubeflow.requests] == [100]


def test_a_server_that_hangs_does_not_keep_the_launcher(
    launch: Launch, kubeflow: KubeflowServer
) -> None:
    kubeflow.answers = 0
    process = start(launch, kubeflow)
    wait_until(lambda: len(kubeflow.requests) == 1)
    assert stop(launch, process) == 0
    assert len(kubeflow.requests) == 2


@pytest.mark.parametrize(
    ("flags", "script", "is_reported"),
    [
        (("--kubeflow-status", "on"), SILENT, True),
        ((), SILENT, False),  # transformers may report by itself
        (("--kubeflow-status", "off"), TELLS, False),
    ],
)
def test_which_jobs_are_reported(
    launch: Launch,
    kubeflow: KubeflowServer,
    flags: tuple[str, ...],
    script: str,
    is_reported: bool,
) -> None:
    process = start(launch, kubeflow, *flags, script=script)
    if is_reported:
        wait_until(lambda: len(kubeflow.requests) == 1)
    assert stop(launch, process) == 0
    percent = [each.status.get("progressPercentage") for each in kubeflow.requests]
    assert percent == ([None, 100] if is_reported else [])


def test_only_the_first_node_reports(launch: Launch, kubeflow: KubeflowServer) -> None:
    """It replaces what others have reported."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    flags = ("--on", "here", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    nodes = [launch, Launch(launch.directory / "other")]
    nodes[1].directory.mkdir()
    processes = [
        start(node, kubeflow, *flags, "--node-rank", str(number))
        for number, node in enumerate(nodes)
    ]
    try:
        wait_until(lambda: len(kubeflow.requests) == 2)
        for node in nodes:
            (node.directory / "stop").touch()
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        processes[1].kill()
        nodes[1].expect_nothing_left()
    percent = [each.status["progressPercentage"] for each in kubeflow.requests]
    assert len(percent) == 3
    assert percent == sorted(percent)
    assert percent[-1] == 100


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_a_signal_ends_leaves_no_reporter(
    launch: Launch, kubeflow: KubeflowServer, number: signal.Signals
) -> None:
    process = start(launch, kubeflow)
    wait_until(lambda: len(kubeflow.requests) == 1)
    process.send_signal(number)
    process.wait(60)
    launch.expect_nothing_left()
    assert all(each.status["progressPercentage"] < 100 for each in kubeflow.requests)


def test_on_without_a_server_is_refused(launch: Launch) -> None:
    script = launch.script("open('ran', 'w')")
    assert launch.run("--kubeflow-status", "on", script) == 2
    assert "KUBEFLOW_TRAINER_SERVER_TOKEN are not all set" in launch.err
    assert not (launch.directory / "ran").exists()
