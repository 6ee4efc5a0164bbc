"""Jobs on old kernels and in sandboxes: the system refuses a call, and the job runs all the same,
or says in one sentence what it lacks. The filter is refusing.py; refused_calls.py has the table.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.conftest import EACH_WAY
from tests.hosts import Hosts
from tests.system.conftest import Launch
from tests.system.refused_calls import CALLS, LAUNCHERS, PROFILES, RANKS

pytestmark = [pytest.mark.system, pytest.mark.exact]

REFUSING = str(Path(__file__).with_name("refusing.py"))
ERRORS = ("ENOSYS", "EPERM")

# Calls of each kind: that wait, and that go on in the background; of memory that peers read, too.
GOOD = """
import sys
import numpy as np
import rallypoint as dist

dist.init_process_group({backend})
rank, ranks = dist.get_rank(), dist.get_world_size()
sum_of_ranks = ranks * (ranks - 1) / 2
for make in (np.empty, dist.empty):
    for count in (1, 1000, 1 << 17):
        array = make(count, np.float64)
        array[:] = np.arange(count) + rank
        dist.all_reduce(array)
        assert (array == ranks * np.arange(count) + sum_of_ranks).all(), array
        array[:] = rank
        dist.all_reduce(array, async_op=True).wait()
        assert (array == sum_of_ranks).all(), array
dist.destroy_process_group()
sys.stdout.write("right\\n")
"""
BAD = """
import numpy as np
import rallypoint as dist

dist.init_process_group({backend})
if dist.get_rank() == 1:
    raise ValueError("a bad batch")
dist.all_reduce(np.ones(1))
"""


def usual_place_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A place that the environment names, and that cannot be used, would be told, too."""
    monkeypatch.delenv("RALLYPOINT_RUN_DIR")


place_of_jobs = pytest.fixture(autouse=True)(usual_place_of_jobs)


def check(launch: Launch, calls: str, error: str, job: str, *, backend: str = "") -> None:
    """The job runs as it would anywhere, or its only fault is what the table has."""
    script = launch.script(job.format(backend=f"{backend!r}" if backend else ""))
    before = (sys.executable, REFUSING, calls, error)
    status = launch.start("--nproc-per-node", "2", script, before=before).wait(120)
    launchers, of_rank = LAUNCHERS.get((calls, error)), RANKS.get((calls, error))
    if launchers is not None:
        assert launch.err.partition(": ")[2] == f"{launchers}\n"  # and nothing else
        assert (status, launch.out) == (1, "")
        return
    report = launch.err[launch.err.find("rallypoint: job failed") :]
    if of_rank is not None and backend != "tcp":
        raised = "raised rallypoint.base.errors.SystemCallError"
        assert report.startswith(f"rallypoint: job failed: rank 0 {raised}: {of_rank}\n")
        assert (status, launch.out) == (1, "")
    elif job is GOOD:
        assert launch.err == ""
        assert (status, launch.out) == (0, "right\nright\n")
    else:
        assert report.startswith("rallypoint: job failed: rank 1 raised ValueError: a bad batch\n")
        assert (status, launch.out) == (1, "")


@pytest.mark.everyday(writer="the ranks, a line each at once")
@pytest.mark.parametrize(
    ("calls", "error", "job"),
    [
        ("pidfd_open", "ENOSYS", GOOD),
        ("pidfd_open", "EPERM", BAD),
        ("memfd_create", "EPERM", GOOD),
        ("memfd_create", "ENOSYS", BAD),
        (PROFILES["linux-4.18"], "ENOSYS", GOOD),
        ("clone3", "EPERM", GOOD),
    ],
    ids=["pidfd", "pidfd-bad", "memfd", "memfd-bad", "linux-4.18", "clone3"],
)
def test_a_refused_call(calls: str, error: str, job: str, launch: Launch) -> None:
    check(launch, calls, error, job)


def cases() -> Sequence[tuple[str, str, str]]:
    """All, or of each call one by turns."""
    every = [
        (call, error, job)
        for call in CALLS
        for error in (*ERRORS, *(["EAFNOSUPPORT"] if call.startswith("socket") else []))
        for job in ("good", "bad")
    ]
    if EACH_WAY:
        return every
    by_call = {call: [case for case in every if case[0] == call] for call in CALLS}
    return [ways[number % len(ways)] for number, ways in enumerate(by_call.values())]


@pytest.mark.parametrize(("call", "error", "job"), cases())
def test_each_refused_call(call: str, error: str, job: str, launch: Launch) -> None:
    check(launch, call, error, GOOD if job == "good" else BAD)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("job", [GOOD, BAD], ids=["good", "bad"])
@pytest.mark.parametrize("backend", ["", "tcp"], ids=["shared memory", "tcp"])
def test_a_profile(backend: str, job: str, profile: str, error: str, launch: Launch) -> None:
    calls = PROFILES[profile]
    if error == "EPERM":  # then nothing can be started, which has its test
        calls = calls.replace("clone3,", "")
    check(launch, calls, error, job, backend=backend)


@pytest.mark.parametrize("call", ["socket[0]=1", "socket[0]=16", "pidfd_open", "memfd_create"])
def test_ranks_that_share_no_memory(call: str, launch: Launch) -> None:
    check(launch, call, "EAFNOSUPPORT", GOOD, backend="tcp")


DESCRIPTORS = """
import os
print(*sorted(map(int, os.listdir("/proc/self/fd"))), flush=True)
"""


def test_workers_inherit_nothing_without_close_range(launch: Launch) -> None:
    """Descriptors are closed one by one then, however many a process might have."""
    script = launch.script(DESCRIPTORS)
    told = []
    for calls in ("openat2", "close_range"):  # nobody calls the first
        before = (sys.executable, REFUSING, calls, "ENOSYS")
        assert launch.start(script, before=before).wait(120) == 0
        told.append(launch.out)
    assert told[0] == told[1] != ""


FAR = """
import sys
import rallypoint as dist
from rallypoint.cluster.netlink import read_interfaces
assert read_interfaces() == ()
dist.init_process_group()
sys.stdout.write(f"{dist.get_rank()} of {dist.get_world_size()}\\n")
"""


@pytest.fixture
def hosts(needs_hosts: None) -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.mark.parametrize("is_elastic", [False, True], ids=["static", "elastic"])
def test_nodes_without_netlink(is_elastic: bool, hosts: Hosts, tmp_path: Path) -> None:
    """They know their addresses all the same, and let each other in."""
    script = tmp_path / "worker.py"
    script.write_text(FAR)
    jobs = []
    for rank, host in enumerate(hosts.hosts):
        command = [sys.executable, REFUSING, "socket[0]=16", "EPERM", sys.executable, "-m"]
        command += ["rallypoint", "run", "--nnodes", "2"]
        if is_elastic:
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "host1:29400"]
        else:
            command += ["--node-rank", str(rank), "--master-addr", "host1"]
        command += [str(script)]
        environ = {**os.environ, "RALLYPOINT_TOKEN": "secret", "TMPDIR": str(tmp_path)}
        pipe = subprocess.PIPE
        jobs.append(host.popen(command, stdout=pipe, stderr=pipe, env=environ))
    told = [job.communicate(timeout=120) for job in jobs]
    assert sorted(told) == [(b"0 of 2\n", b""), (b"1 of 2\n", b"")]
