"""Who can take part, and how each is started: ourselves, PyTorch's gloo, and three MPIs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.cli.benchmark.environments import Environments

OURS = "rallypoint"
PEERS = ("gloo", "mpich", "openmpi", "intelmpi")
_WORKER = str(Path(__file__).with_name("worker.py"))


@dataclass(frozen=True, slots=True)
class Contender:
    """What starts the processes of a contender; ``SOCKET`` stands for what they connect to."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]


def contender(name: str, ranks: int, *, pin: bool, environments: Environments) -> Contender:
    """How a contender is started.

    Raises:
        HostError: it is not there; the message says how to get it.
    """
    if name in ("gloo", OURS):
        return _launched(name, ranks)
    return _mpi(name, environments.find(name), ranks, pin=pin)


def _launched(name: str, ranks: int) -> Contender:
    if name == "gloo":
        from importlib.util import find_spec

        if find_spec("torch") is None:
            raise HostError(
                f"gloo comes with PyTorch, which {sys.executable} does not have: pip install torch"
            )
    run = (sys.executable, "-m", "rallypoint", "run", "--standalone")
    return Contender(
        name,
        (*run, "--nproc-per-node", str(ranks), _WORKER, "SOCKET", name),
        {"GLOO_SOCKET_IFNAME": "lo", **os.environ},
    )


def _mpi(name: str, prefix: Path, ranks: int, *, pin: bool) -> Contender:
    """An MPI with its own defaults; with `pin`, with no other pinning than ours."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if key not in own}
    environ["PATH"] = f"{prefix / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"
    flags: tuple[str, ...] = ()
    if name == "openmpi":
        if ranks > len(os.sched_getaffinity(0)):
            flags += ("--map-by", ":OVERSUBSCRIBE")
        if pin:
            flags += ("--bind-to", "none")
        if os.geteuid() == 0:
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif name == "intelmpi" and pin:
        environ["I_MPI_PIN"] = "off"
    python, start = str(prefix / "bin" / "python"), str(prefix / "bin" / "mpiexec")
    return Contender(
        name, (start, *flags, "-n", str(ranks), python, _WORKER, "SOCKET", "mpi"), environ
    )
