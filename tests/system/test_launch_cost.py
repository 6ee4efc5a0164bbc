"""What a launch, and a rank, must not pay for: modules that cost milliseconds and that no healthy
job needs.

Names, not times: benchmarks/launch.py measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.exact]

EXPENSIVE = {
    *("argparse", "ast", "asyncio", "contextlib", "dataclasses", "datetime", "inspect", "json"),
    *("importlib.metadata", "logging", "multiprocessing", "numpy", "pathlib", "re", "shutil"),
    *("ssl", "subprocess", "tempfile", "threading", "torch", "traceback", "typing", "uuid"),
}


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--standalone", "--nproc-per-node", "2"], marks=pytest.mark.everyday),
        ["--nproc-per-node=auto", "--max-restarts=3", "--shutdown-timeout", "5", "-m"],
        ["--log-dir", "{directory}/logs", "-r", "3", "-t", "0:3", "--log-prefix", "{{rank}}: "],
    ],
    ids=["standalone", "module", "logs"],
)
def test_a_launch_imports_nothing_expensive(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "noop.py").touch()
    words = [flag.format(directory=tmp_path) for flag in flags]
    script = "noop" if "-m" in flags else "noop.py"
    runs = (imported_by([*words, script], tmp_path) for _ in range(100))
    # Programs that tests beside this one start, as `ps`, may find the job and ask it.
    imported = next(each for each in runs if "rallypoint.launch.agent.answers" not in each)
    assert "rallypoint.launch.agent.loop" in imported
    assert not imported & EXPENSIVE


def test_a_launcher_in_a_trainjob_imports_nothing_expensive(tmp_path: Path) -> None:
    """What reports to Kubeflow is another process."""
    (tmp_path / "noop.py").touch()
    names = ("URL", "CA_CERT", "TOKEN")
    variables = {f"KUBEFLOW_TRAINER_SERVER_{name}": "https://localhost:1/" for name in names}
    words = ["--standalone", "noop.py"]
    # Its program may look for the job while that runs.
    runs = (imported_by(words, tmp_path, **variables) for _ in range(100))
    imported = next(each for each in runs if "rallypoint.launch.agent.answers" not in each)
    assert "rallypoint.cli.beside_launcher" in imported
    assert not imported & {*EXPENSIVE, "http", "http.client"}


def imported_by(words: list[str], directory: Path, **environ: str) -> set[str]:
    """What `rallypoint run` imports with these words."""
    launcher = Path(sys.executable).parent / "rallypoint"
    result = subprocess.run(
        [sys.executable, "-X", "importtime", str(launcher), "run", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env={**os.environ, **environ},
    )
    assert result.returncode == 0, result.stderr
    return {
        line.rpartition("|")[2].strip()
        for line in result.stderr.splitlines()
        if line.startswith("import time:")
    }


# Forms the usual group, makes the usual call, and prints the modules of ours before and after.
RANK = """
import json, os, sys
{library}
def ours(): return sorted(name for name in sys.modules if name.startswith("rallypoint"))
before = ours()
dist.init_process_group({backend})
dist.all_reduce(array)
line = json.dumps([before, ours()])
dist.destroy_process_group()
os.write(1, (line + "\\n").encode())
"""
LIBRARIES = {
    "numpy": ("import numpy, rallypoint as dist; array = numpy.ones(2)", ""),
    "torch": ("import torch, torch.distributed as dist; array = torch.ones(2)", "'rallypoint'"),
}
# The number of our modules that a rank loads, and a few to spare.
MOST_OF_OURS = 62
# For failures, other launchers, other hosts, other libraries, users' own algorithms and models.
SELDOM_NEEDED = {
    *("base.control_link", "base.control_message", "cluster", "diagnosis"),
    *("elastic", "launch", "process_group.delegated.delegate", "process_group.delegated.library"),
    *("process_group.formation.host_network", "process_group.formation.joining_libraries"),
    *("process_group.formation.mesh", "process_group.groups.agreeing", "rendezvous"),
    *("schedule.algorithms.ring", "schedule.algorithms.tree", "schedule.cost", "schedule.custom"),
    *("schedule.proof", "store.file", "store.server", "process_group.groups.debug"),
}
# PyTorch's groups have PyTorch's store, and take tensors as they are.
NOT_WITH_TORCH = {
    "process_group.calls",
    "pytorch.torch_calls",
    "pytorch.reconfiguration",
    "store.client",
}


@pytest.mark.everyday
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_imports_what_it_needs(library: str, tmp_path: Path) -> None:
    seldom = SELDOM_NEEDED | (NOT_WITH_TORCH if library == "torch" else set())
    for _, loaded in modules_of_ranks(library, tmp_path):
        needless = {
            name for name in loaded if any(name.startswith(f"rallypoint.{each}") for each in seldom)
        }
        assert not needless
        assert len(loaded) <= MOST_OF_OURS


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_forked_rank_imports_nothing_more(library: str, tmp_path: Path) -> None:
    preload = "torch" if library == "torch" else "numpy,rallypoint"
    for before, after in modules_of_ranks(library, tmp_path, "--preload", preload):
        assert set(after) == set(before)


def modules_of_ranks(library: str, directory: Path, *flags: str) -> list[list[list[str]]]:
    """For each of two ranks, our modules before and after its first call."""
    pytest.importorskip(library)
    (directory / "rank.py").write_text(
        RANK.format(library=LIBRARIES[library][0], backend=LIBRARIES[library][1])
    )
    words = ["-m", "rallypoint", "run", "--nproc-per-node", "2", *flags, "rank.py"]
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2
    return found
