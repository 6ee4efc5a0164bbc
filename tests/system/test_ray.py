"""`rallypoint run --on ray`, and Ray Train with our backend, on a Ray cluster of three test hosts.

    .venv/bin/pip install torch==2.13.0, then .venv/bin/pip install --group ray

Ray itself takes seconds for all that it does, so one cluster serves all tests; each leaves it as it
was.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.conftest import HOW_TO_GET, SOON_S
from tests.hosts import Hosts
from tests.system.nodes import WORKER
from tests.system.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not find_spec("ray"), reason=HOW_TO_GET["ray"]),
]

# Notes signals in a file of the directory that it is given, and stays.
STUBBORN = """
import os, pathlib, signal, sys
directory, name = pathlib.Path(sys.argv[1]), os.uname().nodename
def note(number, _):
    (directory / f"got.{number}.{name}").touch()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
(directory / f"up.{name}.0").write_text(os.environ["WORLD_SIZE"])
while True:
    signal.pause()
"""
TELLS_TOKEN = """
import os, pathlib
pathlib.Path("token").write_text(os.environ["RALLYPOINT_TOKEN"])
"""


@pytest.fixture(scope="module")
def cluster(needs_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with Hosts(3) as hosts, RayCluster(hosts, tmp_path_factory.mktemp("ray")) as cluster:
        yield cluster


@pytest.fixture
def job(cluster: RayCluster, tmp_path: Path) -> Iterator[Path]:
    """A directory for one job; nothing of it may be left."""
    cluster.directory = tmp_path
    yield tmp_path
    assert cluster.left_over(within_s=SOON_S) == []


def script(directory: Path, text: str) -> str:
    (directory / "worker.py").write_text(text)
    return "worker.py"


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=200)
    return process.returncode, out.decode(), err.decode()


def wait_for(directory: Path, *names: str, text: str = "") -> None:
    """Until these files are there, with that text in them."""
    deadline = time.monotonic() + 60
    while not all(_has(directory / name, text) for name in names):
        assert time.monotonic() < deadline, {
            path.name: path.read_text() for path in directory.glob("up.*")
        }
        time.sleep(0.01)


def _has(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


def test_a_failure_of_one_rank_is_told_here(cluster: RayCluster, job: Path) -> None:
    says = "rank = os.environ['RANK']\nos.write(1, f'rank {rank}\\n'.encode())\n"
    text = f"{TELLS_TOKEN}{says}assert rank != '4'"
    words = ("--nnodes", "3", "--nproc-per-node", "2", script(job, text))
    status, out, err = ended(cluster.start(*words))
    assert status == 1, err
    assert "starting on 3 hosts, rendezvous at 10.77.0." in err
    assert "rank 4" in err
    assert "AssertionError" in err
    assert "rank 4\n" in out
    token = (job / "token").read_text()
    assert cluster.find_in_files(token) == []  # nor do Ray's logs know it


def test_ctrl_c_reaches_the_workers(cluster: RayCluster, job: Path) -> None:
    words = ("--nnodes", "2", "--shutdown-timeout", "1", script(job, STUBBORN), ".")
    process = cluster.start(*words)
    deadline = time.monotonic() + 60
    while len(list(job.glob("up.*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(cluster.starter(), signal.SIGINT)
    assert ended(process)[0] == 130
    assert len({path.name.rpartition(".")[2] for path in job.glob("got.*")}) == 2
    assert any(path.name.startswith("got.2.") for path in job.glob("got.*"))


def test_the_starter_is_killed(cluster: RayCluster, job: Path) -> None:
    process = cluster.start("--nnodes", "3", script(job, STUBBORN), ".")
    wait_for(job, "up.host1.0", "up.host2.0", "up.host3.0")
    os.kill(cluster.starter(), signal.SIGKILL)
    assert cluster.left_over(within_s=1.0 + SOON_S) == []
    ended(process)


def test_a_submitted_job_is_stopped(cluster: RayCluster, job: Path) -> None:
    """With copies of the working directory, and workers that ignore SIGTERM."""
    (job / "sent" / "below").mkdir(parents=True)
    words = f"--nnodes 2:3 {script(job / 'sent' / 'below', STUBBORN)} {job}"
    told = cluster.job(
        *("submit", "--no-wait", "--submission-id", "mine", "--working-dir", str(job / "sent")),
        *("--", "sh", "-c", f"cd below && exec rallypoint run --on ray {words}"),
    )
    assert "submitted successfully" in told
    wait_for(job, "up.host1.0", "up.host2.0", "up.host3.0", text="3")
    assert "was stopped" in cluster.job("stop", "mine")
    assert cluster.left_over(within_s=1.0 + SOON_S) == []
    assert {path.name for path in job.glob("got.15.*")} == {
        "got.15.host1",
        "got.15.host2",
        "got.15.host3",
    }


def test_a_killed_raylet_and_a_new_node(cluster: RayCluster, job: Path) -> None:
    process = cluster.start("--nnodes", "2:3", script(job, WORKER))
    wait_for(job, "up.host1.0", "up.host2.0", "up.host3.0", text="/3 ")
    cluster.kill_raylet(3)
    killed_at = time.monotonic()
    wait_for(job, "up.host1.0", "up.host2.0", text="/2 ")
    assert time.monotonic() - killed_at < max(3.0, SOON_S)
    assert cluster.left_over(3, within_s=SOON_S) == []
    cluster.add_node(3)
    wait_for(job, "up.host1.0", "up.host2.0", "up.host3.0", text="/3 ")
    (job / "go").touch()
    status, _, err = ended(process)
    assert status == 0, err
    assert "lost the connection to 10.77.0.3" in err
    assert "starting on 10.77.0.3, too" in err


@pytest.mark.needs_torch
def test_ray_train_has_the_losses_of_gloo(cluster: RayCluster, job: Path) -> None:
    """Bit for bit: a sum of two has one order."""
    results = job / "results.json"
    program = str(Path(__file__).with_name("torch_ray.py"))
    status, _, err = ended(cluster.python(program, str(results)))
    assert status == 0, err[-5000:]
    for losses in json.loads(results.read_text()):
        assert losses["rallypoint"] == losses["gloo"]
        assert len(set(losses["gloo"])) == 8
