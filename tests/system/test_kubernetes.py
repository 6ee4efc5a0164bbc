"""The manifests in examples/kubernetes, with pods as pods.py emulates them.

What Kubernetes says to them is held by tests/unit/docs/test_manifests.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.system.nodes import WORKER, alive_on
from tests.system.pods import Job

pytestmark = pytest.mark.system

MANIFESTS = Path(__file__).parents[2] / "examples" / "kubernetes"
SECRETS = {("digits-token", "token"): "secret"}


@pytest.fixture
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(6) as hosts:
        yield hosts
        deadline = time.monotonic() + 20
        while any(alive_on(host) for host in hosts.hosts):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def up(directory: Path) -> dict[str, str]:
    """Pod and local rank -> "RANK/SIZE NODE/NODES", in any round: a slow pod may join a job."""
    return {
        path.name.removeprefix("up."): path.read_text().partition(" ")[2]
        for path in directory.glob("up.*")
    }


def wait_for(job: Job, directory: Path, expected: dict[str, str], *, is_at_work: bool) -> float:
    """Until these workers have said so; the seconds it took. Else the controllers are busy."""
    begin = time.monotonic()
    while not expected.items() <= up(directory).items():
        assert time.monotonic() - begin < 60, (up(directory), job.story())
        if is_at_work:
            job.work()
        time.sleep(0.01)
    return time.monotonic() - begin


ALL = {f"digits-{i}.0": f"{i}/3 {i}/3" for i in range(3)}


def test_pods_meet_although_their_names_are_known_late(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER)
    manifest = MANIFESTS / "indexed-job.yaml"
    late = {"known_after_s": 5.0, "negative_s": 10.0}
    with Job(hosts, manifest, tmp_path, secrets=SECRETS, **late) as job:
        wait_for(job, tmp_path, ALL, is_at_work=True)
        first = job.pods[0].first_process()
        assert first is not None
        status = Path(f"/proc/{first}/status").read_text()
        assert status.split("NSpid:")[1].splitlines()[0].split()[-1] == "1"
        (tmp_path / "go").touch()
        job.wait()
        assert job.is_complete
        assert [pod.process.returncode for pod in job.pods.values()] == [0, 0, 0], job.story()


def test_an_evicted_pod_is_replaced(hosts: Hosts, tmp_path: Path) -> None:
    """The first one; the others continue meanwhile, and take its replacement in."""
    (tmp_path / "train.py").write_text(WORKER)
    manifest = MANIFESTS / "indexed-job.yaml"
    with Job(hosts, manifest, tmp_path, secrets=SECRETS, negative_s=5.0) as job:
        wait_for(job, tmp_path, ALL, is_at_work=True)
        before = job.pods[0].host.address
        job.evict(0)
        job.pods[0].process.wait(60)
        went_on = {"digits-1.0": "1/2 1/2", "digits-2.0": "0/2 0/2"}
        went_on_s = wait_for(job, tmp_path, went_on, is_at_work=False)
        took_in_s = wait_for(job, tmp_path, ALL, is_at_work=True)
        assert job.pods[0].host.address != before
        print(f"the others went on after {went_on_s:.2f} s; all were there {took_in_s:.2f} s later")
        (tmp_path / "go").touch()
        job.wait()
        assert job.is_complete, job.story()


def test_a_wrong_command_line_ends_the_job(hosts: Hosts, tmp_path: Path) -> None:
    """There is no train.py: exit status 2, which no new pod would change."""
    with Job(hosts, MANIFESTS / "indexed-job.yaml", tmp_path, secrets=SECRETS) as job:
        job.wait()
        assert job.has_failed
        assert len(list(tmp_path.glob("output.*"))) == 3  # none was replaced
        assert "train.py" in job.story()
