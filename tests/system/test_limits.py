"""What a job says if the system gives it less than it needs: one sentence; nothing is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.conftest import OURS, Launch
from tests.system.test_refusals import BAD, GOOD, REFUSING, usual_place_of_jobs

pytestmark = pytest.mark.system

LIMITED = (
    "import os, resource, sys\n"
    "resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[3:]])\n"
)
# Of namespaces of its own, in which nothing outside changes.
APART = ("unshare", "--user", "--map-root-user")
NO_NETWORK = (*APART, "--net")
NO_PROC = (*APART, "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
DOWN = (
    "the loopback interface is down, and without it processes of this machine cannot reach each "
    "other; run `ip link set lo up` as root"
)
RAISED = "raised rallypoint.base.errors.SystemCallError"


def limited(name: str, limit: int) -> tuple[str, ...]:
    return ("-c", LIMITED, name, str(limit), *OURS)


place_of_jobs = pytest.fixture(autouse=True)(usual_place_of_jobs)


@pytest.fixture(scope="session")
def needs_namespaces() -> None:
    if subprocess.run([*NO_NETWORK, "true"], check=False).returncode:
        pytest.skip("this machine forbids namespaces (sysctl kernel.unprivileged_userns_clone)")


@pytest.fixture
def control_group() -> Iterator[Path]:
    """A control group that counts processes; the test process is not in it."""
    for root in ("/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        group = Path(root, f"rallypoint-test-{os.getpid()}")
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "pids.max").exists():
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("this machine lets nobody make control groups that count processes (needs root)")


@pytest.mark.exact
@pytest.mark.parametrize(
    "limit", [10, pytest.param(12, marks=pytest.mark.everyday(writer="the launcher")), 16, 20]
)
def test_too_few_descriptors(limit: int, launch: Launch) -> None:
    script = launch.script(GOOD.format(backend=""))
    assert (
        launch.run("--nproc-per-node", "4", script, launcher=limited("RLIMIT_NOFILE", limit)) == 1
    )
    # With 20, a first worker may connect before the next one cannot be started.
    lines = [each for each in launch.err.splitlines() if not each.startswith("rallypoint store: ")]
    assert lines == [
        f"rallypoint run: the launcher ran out of file descriptors ({limit} here; 4 workers need"
        " about 48): raise the limit with ulimit -n."
    ]


@pytest.mark.parametrize("limit", range(20, 40, 2))
def test_few_descriptors(limit: int, launch: Launch) -> None:
    """With how many a job runs is nobody's promise; that it ends is."""
    script = launch.script(GOOD.format(backend=""))
    status = launch.run("--nproc-per-node", "4", script, launcher=limited("RLIMIT_NOFILE", limit))
    if status == 0:
        assert launch.out == "right\n" * 4
    else:
        assert "ran out of file descriptors" in launch.err


TOO_MANY_GROUPS = """
import os, resource, sys
import rallypoint as dist
dist.init_process_group(sys.argv[1])
limit = len(os.listdir("/proc/self/fd")) + 20
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
groups = [dist.new_group() for _ in range(100)]
dist.barrier(groups[-1])
sys.stdout.write("right\\n")
"""


def test_groups_of_one_host_take_no_descriptors(launch: Launch) -> None:
    assert launch.run("--nproc-per-node", "2", launch.script(TOO_MANY_GROUPS), "shm") == 0
    assert launch.out == "right\nright\n"


def test_groups_of_several_hosts_say_which_limit_they_reach(launch: Launch) -> None:
    """The report comes although no descriptor is left for it."""
    assert launch.run("--nproc-per-node", "2", launch.script(TOO_MANY_GROUPS), "tcp") == 1
    report = launch.err[launch.err.find("rallypoint: job failed") :].partition("\n")[0]
    assert f"{RAISED}: this process ran out of file descriptors (" in report
    assert "raise the limit with ulimit -n." in report


@pytest.mark.exact
@pytest.mark.parametrize("limit", [0, pytest.param(1 << 20, marks=pytest.mark.everyday), 12 << 20])
def test_files_may_not_grow(limit: int, launch: Launch) -> None:
    """The region is a file, too; what the job writes goes through a pipe."""
    script = launch.script(GOOD.format(backend=""))
    command = [sys.executable, *limited("RLIMIT_FSIZE", limit), "--nproc-per-node", "2", script]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(launch.directory)}
    job = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert (job.returncode, job.stdout) == (1, "")
    report = job.stderr[job.stderr.find("rallypoint: job failed") :].partition("\n")[0]
    assert report == (
        f"rallypoint: job failed: rank 0 {RAISED}: this process reached the limit on the size of "
        f"files ({limit >> 10} KiB here), which also applies to memory that ranks share: raise it "
        "with ulimit -f unlimited."
    )


@pytest.mark.parametrize("limit_mb", [90, 100, 110, 120, 160, 200])
def test_little_address_space(limit_mb: int, launch: Launch) -> None:
    """How much NumPy takes differs; the launcher must say something sensible with any limit."""
    script = launch.script(GOOD.format(backend=""))
    launcher = limited("RLIMIT_AS", limit_mb * 1_000_000)
    status = launch.run("--nproc-per-node", "2", script, launcher=launcher)
    if status == 0:
        assert launch.out == "right\nright\n"
        return
    lines = [line for line in launch.err.splitlines() if line.startswith("rallypoint: ")]
    assert lines[0].startswith(
        ("rallypoint: job failed: rank ", "rallypoint: this process ran out")
    )
    if "rallypoint.base.errors" in lines[0]:
        assert f"ran out of address space ({limit_mb * 1_000_000 >> 20} MiB here)" in lines[0]


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="it needs root and setpriv"
)
@pytest.mark.parametrize("limit", [1, 2])
def test_too_few_processes(limit: int, launch: Launch) -> None:
    """As another user, whom the limit binds, but who may read what root installed."""
    user = 64321  # nobody else's processes count
    drop = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    drop += ["--inh-caps=+dac_override", "--ambient-caps=+dac_override", sys.executable]
    python = ("-c", f"import os, sys; os.execvp('setpriv', {drop!r} + sys.argv[1:])")
    environ = {"PYTHONDONTWRITEBYTECODE": "1"}
    words = ("--nproc-per-node", "6", launch.script(""))
    launcher = (*python, *limited("RLIMIT_NPROC", limit))
    assert launch.run(*words, environ=environ, launcher=launcher) == 1
    assert launch.err == (
        "rallypoint run: the launcher cannot start more processes: this user's limit of all "
        f"processes and threads is reached ({limit} here); raise it with ulimit -u, or end other "
        "processes.\n"
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7])
def test_a_control_group_with_too_few_processes(
    limit: int, launch: Launch, control_group: Path
) -> None:
    (control_group / "pids.max").write_text(str(limit))
    enter = ("sh", "-c", f'echo 0 > {control_group}/cgroup.procs && exec "$@"', "sh")
    script = launch.script(GOOD.format(backend=""))
    assert launch.start("--nproc-per-node", "2", script, before=enter).wait(120) == 1
    launch.expect_nothing_left()
    (line, *_) = [
        line
        for line in launch.err.splitlines()
        if line.startswith(("rallypoint run: ", "rallypoint: job failed: "))
    ]
    assert (
        f"cannot start more processes: its control group is limited to {limit} processes and "
        f"threads ({control_group}/pids.max); raise that (docker run --pids-limit, TasksMax of "
        "systemd, podPidsLimit of Kubernetes), or start fewer"
    ) in line
    assert "ulimit -u" not in launch.err


THREADS = """
import threading, time
import rallypoint as dist
dist.init_process_group()
if dist.get_rank() == 1:
    for _ in range(1000):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
dist.barrier()
"""


def test_a_program_that_starts_too_many_threads(launch: Launch, control_group: Path) -> None:
    """Python's own error does not say why."""
    (control_group / "pids.max").write_text("40")
    enter = ("sh", "-c", f'echo 0 > {control_group}/cgroup.procs && exec "$@"', "sh")
    job = launch.start("--nproc-per-node", "2", launch.script(THREADS), before=enter)
    assert job.wait(120) == 1
    launch.expect_nothing_left()
    assert (
        "rallypoint: job failed: rank 1 raised RuntimeError: can't start new thread (this process "
        "cannot start more processes: its control group is limited to 40 processes and threads"
    ) in launch.err


@pytest.mark.parametrize("has_room", [False, True], ids=["nowhere", "in TMPDIR"])
def test_a_full_dev_shm(has_room: bool, launch: Launch, needs_namespaces: None) -> None:
    """It counts only where memfds are refused."""
    size = "64m" if has_room else "64k"
    mounts = "mount -t tmpfs -o size=4k none /dev/shm && mount -t tmpfs -o size=%s none %s && "
    other = launch.directory / "other"
    other.mkdir()
    script = mounts % (size, other) + 'exec "$@"'
    before = [*APART, "--mount", "sh", "-c", script, "sh", sys.executable, REFUSING]
    words = ("--nproc-per-node", "2", launch.script(GOOD.format(backend="")))
    environ = {"TMPDIR": str(other)}
    job = launch.start(*words, before=[*before, "memfd_create", "EPERM"], environ=environ)
    status = job.wait(120)
    if has_room:
        assert (status, launch.out, launch.err) == (0, "right\nright\n", "")
        return
    assert status == 1
    assert "rallypoint: job failed: rank 0 raised" in launch.err
    assert (
        "memfd_create is refused (Operation not permitted), and no file can replace" in launch.err
    )


@pytest.mark.parametrize("has_memfds", [True, False])
def test_a_full_dev_shm_does_not_matter_otherwise(
    has_memfds: bool, launch: Launch, needs_namespaces: None
) -> None:
    script = 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"'
    before = [*APART, "--mount", "sh", "-c", script, "sh"]
    if not has_memfds:
        before += [sys.executable, REFUSING, "memfd_create", "ENOSYS"]
    job = launch.start(
        "--nproc-per-node", "2", launch.script(GOOD.format(backend="")), before=before
    )
    assert (job.wait(120), launch.out, launch.err) == (0, "right\nright\n", "")


def test_a_loopback_that_is_down(launch: Launch, needs_namespaces: None) -> None:
    script = launch.script(GOOD.format(backend=""))
    assert launch.start("--nproc-per-node", "2", script, before=NO_NETWORK).wait(120) == 1
    assert launch.err.startswith(f"rallypoint run: {DOWN}\n")
    report = launch.err[launch.err.find("rallypoint: job failed") :].partition("\n")[0]
    assert "raised rallypoint.base.errors.StoreConnectionError: the store at 127.0.0.1:" in report
    assert f"cannot be reached: {DOWN}" in report


def test_what_needs_no_loopback_runs_without(launch: Launch, needs_namespaces: None) -> None:
    job = launch.start("--nproc-per-node", "2", launch.script(""), before=NO_NETWORK)
    assert (job.wait(120), launch.err) == (0, f"rallypoint run: {DOWN}\n")


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("calls", ["", "pidfd_open,memfd_create,close_range"])
@pytest.mark.parametrize("is_good", [True, False], ids=["good", "bad"])
def test_no_proc(
    is_good: bool, calls: str, backend: str, launch: Launch, needs_namespaces: None
) -> None:
    """Nor what it is read for otherwise."""
    script = launch.script((GOOD if is_good else BAD).format(backend=f"{backend!r}"))
    before = [*NO_PROC, *((sys.executable, REFUSING, calls, "ENOSYS") if calls else ())]
    status = launch.start("--nproc-per-node", "2", script, before=before).wait(120)
    if is_good:
        assert (status, launch.out, launch.err) == (0, "right\nright\n", "")
    else:
        assert (status, launch.out) == (1, "")
        assert "rallypoint: job failed: rank 1 raised ValueError: a bad batch\n" in launch.err


STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
rank = os.environ["RANK"]
if rank == "1":
    while not os.path.exists("up"):
        time.sleep(0.01)
    raise SystemExit(3)
open("up", "w").close()
time.sleep(600)
"""


def test_workers_are_ended_without_proc(launch: Launch, needs_namespaces: None) -> None:
    """Only they, and their groups, are known then."""
    script = launch.script(STUBBORN)
    words = ("--nproc-per-node", "2", "--shutdown-timeout", "1", script)
    assert launch.start(*words, before=NO_PROC).wait(120) == 1
    assert "rank 1 exited with code 3" in launch.err
    launch.expect_nothing_left()
