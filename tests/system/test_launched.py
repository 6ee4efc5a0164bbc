"""Programs that mpirun, mpiexec, srun and flux run start themselves: init_process_group() finds
the job, without a variable or a port that anybody chose.

The MPIs are real, on this machine and on two test hosts. Slurm's and Flux's processes are started
here with the variables that those set; Flux's PMI server is a stand-in.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.conftest import EACH_WAY
from tests.hosts import Hosts
from tests.pages import blocks_tested_by
from tests.remote_shell import RemoteShell
from tests.system.everyday import wait_until
from tests.system.nodes import alive_on
from tests.unit.cluster.pmi_server import PmiServer

from rallypoint.lab.bench.contenders import default_cache

pytestmark = pytest.mark.system

MPIS = ("mpich", "openmpi", "intelmpi")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 200.0  # against hanging: two jobs of two ranks that import torch, on a busy machine
# Of those who may have started the tests, and what would say where to meet.
NOT_OURS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RALLYPOINT_TOKEN", "RALLYPOINT_CLUSTER",
)  # fmt: skip
# The test hosts are one machine: no MPI is to tie its ranks to the same first core.
SHARE = {
    "OMP_NUM_THREADS": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "I_MPI_PIN": "off",
}

# Says one line for each rank, at once, so that lines do not mix.
SAY = """
import os, sys
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""
COLLECTIVES = """
import numpy as np
import rallypoint as dist
def use_a_group():
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    x = np.arange(1000.0) * (rank + 1)
    dist.all_reduce(x)
    assert np.array_equal(x, np.arange(1000.0) * (size * (size + 1) // 2))
    names = [None] * size
    dist.all_gather_object(names, (os.environ["RANK"], os.environ["LOCAL_RANK"]))
    assert [name[0] for name in names] == list(map(str, range(size)))
    dist.destroy_process_group()
    return rank, size, names[rank][1]
"""
GROUPS = (
    SAY
    + COLLECTIVES
    + """
assert "MASTER_PORT" not in os.environ
say("ranks", *use_a_group())
use_a_group()  # another group of the same processes
"""
)
# MPI as any other user of it in this process calls it; its library is the first argument.
MPI = """
import ctypes
mpi = ctypes.CDLL(sys.argv[1])
def use_mpi():
    try:  # Open MPI's are pointers, the others' are numbers
        world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
    except ValueError:
        world = ctypes.c_int(0x44000000)
    rank, size = ctypes.c_int(-1), ctypes.c_int(-1)
    assert mpi.MPI_Comm_rank(world, ctypes.byref(rank)) == 0
    assert mpi.MPI_Comm_size(world, ctypes.byref(size)) == 0
    assert mpi.MPI_Barrier(world) == 0
    say("mpi", rank.value, size.value)
"""
THEN_MPI = (
    GROUPS
    + MPI
    + """
assert mpi.MPI_Init(None, None) == 0
use_mpi()
use_a_group()
assert mpi.MPI_Finalize() == 0
use_a_group()
"""
)
MPI_FIRST = (
    SAY
    + COLLECTIVES
    + MPI
    + """
assert mpi.MPI_Init(None, None) == 0
say("ranks", *use_a_group())
use_mpi()
assert mpi.MPI_Finalize() == 0
"""
)
TRAIN = (
    "import os, runpy, sys\n"
    + SAY
    + MPI
    + """
assert "MASTER_PORT" not in os.environ
os.environ["RALLYPOINT_AS_GLOO"] = "1"  # here, as Open MPI passes no variables on to other hosts
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
assert mpi.MPI_Init(None, None) == 0
use_mpi()
assert mpi.MPI_Finalize() == 0
"""
)
DDP = (
    SAY
    + """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
assert "MASTER_PORT" not in os.environ
for turn, backend in enumerate(sys.argv[1:]):
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert int(os.environ["LOCAL_RANK"]) < int(os.environ["LOCAL_WORLD_SIZE"])
    torch.manual_seed(turn)
    net = DistributedDataParallel(torch.nn.Linear(3, 1))
    alone = torch.nn.Linear(3, 1)
    alone.load_state_dict(net.module.state_dict())
    data = torch.arange(3.0 * size).reshape(size, 3)
    step = torch.optim.SGD(net.parameters(), lr=0.01)
    net(data[rank : rank + 1]).pow(2).mean().backward()
    step.step()
    step = torch.optim.SGD(alone.parameters(), lr=0.01)
    alone(data).pow(2).mean().backward()
    step.step()
    for ours, theirs in zip(net.module.parameters(), alone.parameters()):
        assert torch.allclose(ours, theirs, atol=1e-5), (ours, theirs)
    del net
    dist.destroy_process_group()
say("ranks", rank, size, os.environ["LOCAL_RANK"])
"""
)


class Job:
    """Starts programs by an MPI's mpiexec, here or on two test hosts."""

    def __init__(
        self, mpi: str, directory: Path, hosts: Hosts | None = None, rsh: Sequence[str] = ()
    ) -> None:
        self.name = mpi
        self._prefix = default_cache() / mpi
        self._directory = directory
        self._hosts = hosts
        self._rsh = directory / "rsh"
        if not (self._prefix / "made").exists():
            pytest.skip(f"{mpi} is not installed: rallypoint bench all_reduce --vs {mpi} --get-mpi")
        if hosts is not None:
            self._rsh.write_text(f'#!/bin/sh\nexec {" ".join(rsh)} "$@"\n')
            self._rsh.chmod(0o755)

    @property
    def library(self) -> str:
        """Its libmpi; the wheels' libmpi.so is an empty file or a link."""
        return str(next(self._prefix.glob("lib/libmpi.so.[0-9][0-9]")))

    @property
    def hosts(self) -> Hosts | None:
        return self._hosts

    @property
    def environ(self) -> dict[str, str]:
        """In which its programs find each other, and ours are found, too."""
        given = {name: text for name, text in os.environ.items() if name not in NOT_OURS}
        folders = [str(self._prefix / "bin"), str(Path(sys.executable).parent)]
        path = os.pathsep.join([*folders, given.get("PATH", os.defpath)])
        if self.name == "intelmpi":  # its libraries find each other by its own python only
            given["LD_LIBRARY_PATH"] = str(self._prefix / "lib")
        return {**given, "PATH": path, "TMPDIR": str(self._directory), **SHARE}

    def start(
        self,
        text: str,
        *words: str,
        ranks: int = 2,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        """So many ranks, on two hosts half of them on each."""
        script = self._directory / f"script-{abs(hash(text))}.py"
        script.write_text(text)
        return self.start_command(python, str(script), *words, ranks=ranks, environ=environ)

    def start_command(
        self, *command: str, ranks: int = 2, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        start = [str(self._prefix / "bin" / "mpiexec"), *self._where(ranks), "-n", str(ranks)]
        given = {**self.environ, **(environ or {})}
        if self._hosts is not None:
            return self._hosts[1].popen(
                [*start, *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=given,
                cwd=self._directory,
            )
        return subprocess.Popen(
            [*start, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=given,
            cwd=self._directory,
        )

    def _where(self, ranks: int) -> list[str]:
        if self._hosts is None:
            return ["--map-by", "slot:OVERSUBSCRIBE"] * (self.name == "openmpi")
        each = ranks // 2
        if self.name == "openmpi":
            slots = f"host1:{each},host2:{each}"
            return ["--host", slots, "--prtemca", "plm_ssh_agent", str(self._rsh)]
        launcher = "bootstrap" if self.name == "intelmpi" else "launcher"
        how = [f"-{launcher}", "ssh", f"-{launcher}-exec", str(self._rsh)]
        return ["-hosts", "host1,host2", "-ppn", str(each), *how]


def finished(process: subprocess.Popen[bytes]) -> list[str]:
    """What its ranks said, in order, once it has ended well."""
    try:
        out = err = b""
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # others may hold its pipes
            out, err = process.communicate(timeout=60)
        raise AssertionError(f"it still ran\n{out.decode()}\n{err.decode()}") from None
    assert process.returncode == 0, f"{process.returncode}\n{out.decode()}\n{err.decode()}"
    return sorted(out.decode().splitlines())


def ranks_of(size: int, hosts: int = 1) -> list[str]:
    each = size // hosts
    return [f"ranks {rank} {size} {rank % each}" for rank in range(size)]


def mpis_of(size: int) -> list[str]:
    return [f"mpi {rank} {size}" for rank in range(size)]


def under(fixture: str, *mpis: str) -> pytest.MarkDecorator:
    """A job of these MPIs; of each MPI in `make check-long`."""
    return pytest.mark.parametrize(fixture, MPIS if EACH_WAY else mpis, indirect=True)


@pytest.fixture
def here(request: pytest.FixtureRequest, tmp_path: Path) -> Job:
    return Job(request.param, tmp_path)


@pytest.fixture
def across(
    needs_hosts: None,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Job]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the remote shell's, where daemons leave things
    with Hosts(2) as hosts, RemoteShell(hosts, tmp_path) as shell:
        yield Job(request.param, tmp_path, hosts, shell.command)


# On this machine.


@under("here", *MPIS)
def test_ranks_find_themselves_and_mpi_can_begin_afterwards(here: Job) -> None:
    lines = finished(here.start(THEN_MPI, here.library))
    assert lines == [*mpis_of(2), *ranks_of(2)]


@under("here", "openmpi")
def test_they_find_themselves_where_mpi_has_begun(here: Job) -> None:
    lines = finished(here.start(MPI_FIRST, here.library))
    assert lines == [*mpis_of(2), *ranks_of(2)]


@under("here", "mpich")
def test_a_rank_that_leaves_early_ends_nobody(here: Job) -> None:
    """Rank 0 stays until rank 1 is gone."""
    late = """
import time
def is_gone():
    try:
        with open("pid") as pid, open(f"/proc/{pid.read()}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return os.path.exists("pid")
if os.environ["RANK"] == "1":
    with open("part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("part", "pid")
else:
    while not is_gone():
        time.sleep(0.01)
say("end")
"""
    assert finished(here.start(GROUPS + late)) == ["end", "end", *ranks_of(2)]


@under("here", "openmpi")
@pytest.mark.needs_torch
def test_pytorch_finds_the_job_for_any_backend(here: Job) -> None:
    assert finished(here.start(DDP, *["rallypoint"] * 2, *["gloo"] * 2)) == ranks_of(2)


@under("here", "mpich")
def test_mpi4py_tells_them_if_it_is_there(here: Job, tmp_path: Path) -> None:
    """In the MPI's environment, where PMI and PMIx are not asked for."""
    text = """
from mpi4py import MPI
import rallypoint.cluster.pmi.meeting as meeting
def refuse(*_):
    raise AssertionError("the launcher was asked")
import rallypoint.cluster.pmi.pmi as pmi, rallypoint.cluster.pmi.pmix as pmix
pmi.pass_on = pmix.pass_on = refuse
"""
    import rallypoint

    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "rallypoint").symlink_to(Path(rallypoint.__file__).parent)
    python = default_cache() / here.name / "bin" / "python"
    environ = {"PYTHONPATH": str(tmp_path / "path")}
    lines = finished(here.start(text + GROUPS, python=str(python), environ=environ))
    assert lines == ranks_of(2)


@under("here", "openmpi")
def test_the_guides_command(here: Job, tmp_path: Path) -> None:
    blocks = blocks_tested_by("tests/system/test_launched.py::test_the_guides_command")
    (command,) = {block.text for block in blocks}  # two guides have it
    (tmp_path / "train.py").write_text(GROUPS)
    # The prefix of an MPI has a python, too.
    text = command.replace(" python ", f" {sys.executable} ")
    crowded = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    job = subprocess.Popen(
        text.split(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**here.environ, **crowded},
        cwd=tmp_path,
    )
    # Local ranks need not follow ranks where there are more than slots.
    assert [line.split()[:3] for line in finished(job)] == [
        line.split()[:3] for line in ranks_of(4)
    ]


@under("here", "openmpi")
def test_where_says_what_a_program_would_take(here: Job) -> None:
    job = here.start_command(sys.executable, "-m", "rallypoint", "where")
    lines = finished(job)
    assert any("init_process_group() takes" in line for line in lines)
    assert sum(line.startswith("rank        1 of 2 ") for line in lines) == 1
    assert sum(line.startswith("local rank  0 of 2 ") for line in lines) == 1


# On two hosts.


@under("across", *MPIS)
def test_ranks_on_two_hosts(across: Job) -> None:
    assert across.hosts is not None
    lines = finished(across.start(THEN_MPI, across.library, ranks=4))
    assert lines == [*mpis_of(4), *ranks_of(4, hosts=2)]
    hosts = across.hosts.hosts  # who asks PMIx for a rank ends when it sees that it did
    wait_until(lambda: not any(alive_on(host) for host in hosts))


@pytest.mark.repeated
@under("across", "openmpi")
@pytest.mark.parametrize(
    "example",
    [
        "train_digits.py",
        pytest.param("train_digits_ddp.py", marks=(pytest.mark.needs_torch, pytest.mark.seldom)),
    ],
)
def test_two_jobs_train_on_two_hosts_and_use_mpi(across: Job, example: str) -> None:
    """Those of PyTorch as it is, with "gloo" meaning ours."""
    pytest.importorskip("sklearn")
    words = (across.library, str(EXAMPLES / example), "--epochs", "5")
    jobs = [across.start(TRAIN, *words) for _ in range(2)]
    for job in jobs:
        lines = finished(job)
        (accuracy,) = [float(line.split()[2]) for line in lines if line.startswith("test ")]
        assert accuracy > 0.9
        assert [line for line in lines if line.startswith("mpi ")] == mpis_of(2)


@under("across", "mpich")
@pytest.mark.needs_torch
def test_gloo_on_two_hosts(across: Job) -> None:
    lines = finished(across.start(DDP, "gloo", "gloo", environ={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert lines == ranks_of(2, hosts=2)


# Without an MPI.


def slurm(host: int, task: int, **more: str) -> dict[str, str]:
    """As srun gives them to a task on that host, of two with two tasks each."""
    return {
        **{name: text for name, text in os.environ.items() if name not in NOT_OURS},
        **SHARE,
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "host[1-2]",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": str(host - 1),
        "SLURM_PROCID": str(2 * (host - 1) + task),
        "SLURM_LOCALID": str(task),
        **more,
    }


def start_step(
    hosts: Hosts, directory: Path, text: str, *words: str, **more: str
) -> list[subprocess.Popen[bytes]]:
    """The last task first."""
    script = directory / "step.py"
    script.write_text(text)
    return [
        hosts[host].popen(
            [sys.executable, str(script), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=slurm(host, task, **more),
            cwd=directory,
        )
        for host in (2, 1)
        for task in (1, 0)
    ]


def test_tasks_of_a_step_meet_without_pmi(needs_hosts: None, tmp_path: Path) -> None:
    """And those of another one that comes to the same ports, as after a restart, do not mix."""
    with Hosts(2) as hosts:
        steps = [
            start_step(hosts, tmp_path, GROUPS, SLURM_RESTART_COUNT=str(count))
            for count in range(2)
        ]
        for tasks in steps:
            lines = [line for task in tasks for line in finished(task)]
            assert sorted(lines) == ranks_of(4, hosts=2)


@pytest.mark.everyday
def test_tasks_of_flux_meet_through_its_pmi(tmp_path: Path) -> None:
    script = tmp_path / "flux.py"
    script.write_text(GROUPS)
    given = {name: text for name, text in os.environ.items() if name not in NOT_OURS}
    with PmiServer(2) as server:
        tasks = [
            subprocess.Popen(
                [sys.executable, str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[server.fd(rank)],
                env={
                    **given,
                    "FLUX_JOB_ID": "f12",
                    "FLUX_TASK_RANK": str(rank),
                    "FLUX_TASK_LOCAL_ID": str(rank),
                    "FLUX_JOB_SIZE": "2",
                    "FLUX_JOB_NNODES": "1",
                    "PMI_RANK": str(rank),
                    "PMI_SIZE": "2",
                    "PMI_FD": str(server.fd(rank)),
                },
            )
            for rank in range(2)
        ]
        lines = [line for task in tasks for line in finished(task)]
    assert sorted(lines) == ranks_of(2)
