"""The possible contenders, and how each is started: ours, PyTorch's gloo, UCX, and three MPIs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rallypoint.base.errors import HostError
from rallypoint.lab.bench.environments import Environments, is_mpi

OURS = "rallypoint"
PEERS = ("gloo", "mpich", "openmpi", "intelmpi", "ucx")
_WORKER = str(Path(__file__).with_name("contender_worker.py"))


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
    if name in environments.names:
        environments.find(name)
    elif name == "gloo":
        from importlib.util import find_spec

        if find_spec("torch") is None:
            raise HostError(
                f"gloo comes with PyTorch, which {sys.executable} does not have: pip install torch"
            )


def contender(name: str, setting: Setting, environments: Environments) -> Contender:
    """How to start a contender."""
    prefix = environments.find(name) if name in environments.names else None
    if prefix is not None and is_mpi(name):
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
