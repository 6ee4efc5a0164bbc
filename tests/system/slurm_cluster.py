"""A real Slurm of three nodes, each on a test host of its own, and so with an address of its own.

    host1: slurmd n1   host2: slurmd n2   host3: slurmd n3   host4: slurmctld, users' commands

munged is on host4, too; the others reach it by its socket, a file. Everything is below the hosts'
first processes, so it ends with the hosts, whatever it did. The nodes are not called as the hosts
are: /etc/hosts knows n1, n2 and n3 unless a test takes them away.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.hosts import Host, Hosts
from tests.system.nodes import alive_on

NODES = (1, 2, 3)
_ADMINISTRATORS = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/local/sbin"
_NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
_DAEMONS = ("slurmd", "slurmctld", "munged")
# What differs from a site's: short times, no accounting, no control groups (proctrack/linuxproc
# finds a step's processes by their parents), and many more CPUs than there are.
_SETTINGS = """\
ClusterName=rallypoint
SlurmctldHost=host4
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={directory}/munge.socket,cred_expire=5
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool.%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
"""
_NODE = "NodeName=n{i} NodeHostname=host{i} NodeAddr={address} CPUs=32 RealMemory=1000\n"
_PARTITION = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE\n"


def need_slurm() -> None:
    """Skip the test if Slurm is not installed, or may not be started."""
    if any(shutil.which(name, path=_ADMINISTRATORS) is None for name in _NEEDED):
        pytest.skip("Slurm is not installed: apt install slurm-wlm munge")
    if os.geteuid() != 0:
        pytest.skip("only root starts Slurm's daemons here: run as root")


class SlurmCluster:
    """The cluster, and commands that a user gives on host4."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.processes: list[subprocess.Popen[bytes]] = []  # to be waited for after the hosts' end
        self._directory = directory
        self._plain_names = hosts.names.read_text()
        self._names = self._plain_names
        settings = _SETTINGS.format(directory=directory)
        for i in NODES:
            address = hosts[i].address
            self._names += f"{address} n{i}\n"
            settings += _NODE.format(i=i, address=address)
            (directory / f"spool.n{i}").mkdir()
        hosts.names.write_text(self._names)
        (directory / "slurm.conf").write_text(settings + _PARTITION)
        # 22.05 loads a plug-in for control groups even if nothing here uses them; this one touches
        # none.
        (directory / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (directory / "state").mkdir()
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o400)
        files = {each: f"{directory}/munge.{each}" for each in ("key", "pid", "log", "seed")}
        words = [f"--{each}-file={file}" for each, file in files.items()]
        words += ["--foreground", "--force", f"--socket={directory}/munge.socket"]
        self._start(hosts[4], "munged", *words)
        self._wait(lambda: (directory / "munge.socket").exists(), "munged's socket")
        self._start(hosts[4], "slurmctld", "-D", "-c")
        for i in NODES:
            self._start(hosts[i], "slurmd", "-D", "-c", "-N", f"n{i}")
        self._wait(lambda: self.ask("sinfo -h -t idle -o %D") == "3", "three idle nodes")

    # What a user does.

    def start(
        self, command: str, directory: Path, name: str = "command", path: str = ""
    ) -> subprocess.Popen[bytes]:
        """A shell's command, in that directory; its output goes to NAME.out and NAME.err there.

        `path`: instead of the usual PATH, to which our own programs are added.
        """
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        environ = {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}:{path or inherited['PATH']}",
            "SLURM_CONF": str(self._directory / "slurm.conf"),
            "RALLYPOINT_TOKEN": "a secret",
            "TMPDIR": str(directory),
            "OMP_NUM_THREADS": "1",
        }
        words = ["sh", "-c", command]
        outputs = (directory / f"{name}.out", directory / f"{name}.err")
        with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
            started = self.hosts[4].popen(words, stdout=out, stderr=err, env=environ, cwd=directory)
        self.processes.append(started)
        return started

    def run(
        self, command: str, directory: Path, name: str = "command", path: str = ""
    ) -> tuple[int, str, str]:
        """The same, waited for: its exit status, and what it wrote."""
        process = self.start(command, directory, name, path)
        try:
            status = process.wait(120)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{command} has not ended\n{self.story(directory)}")
        return status, (directory / f"{name}.out").read_text(), read(directory / f"{name}.err")

    def ask(self, command: str) -> str:
        """What a short command prints."""
        status, out, _ = self.run(command, self._directory, "asked")
        return out.strip() if status == 0 else ""

    def submit(self, command: str, directory: Path) -> str:
        """`sbatch ...`; the job's number."""
        status, out, err = self.run(command, directory, "sbatch")
        assert status == 0, err
        return out.split()[-1]

    def state(self, job: str) -> str:
        """As squeue shows it; empty: it is over."""
        return self.ask(f"squeue -h -j {job} -o %T")

    # What happens to it.

    @contextmanager
    def without_names(self) -> Iterator[None]:
        """For a while nobody but Slurm knows where n1, n2 and n3 are."""
        self.hosts.names.write_text(self._plain_names)
        try:
            yield
        finally:
            self.hosts.names.write_text(self._names)

    def left(self, number: int) -> list[int]:
        """Processes on a node beside its daemon: of steps, and their slurmstepd."""
        return [pid for pid in alive_on(self.hosts[number]) if _name(pid) not in _DAEMONS]

    def kill_step(self, number: int) -> None:
        """All processes of all steps on that node, as a power failure would."""
        for pid in self.left(number):
            with suppress(ProcessLookupError):  # one of the others' ends was its own
                os.kill(pid, signal.SIGKILL)

    def clear(self) -> None:
        """End all jobs; what then is left on the nodes fails the test."""
        self.ask("scancel --user=root")
        self._wait(lambda: self.ask("squeue -h") == "", "an empty queue")
        try:
            self._wait(lambda: not any(map(self.left, NODES)), "empty nodes")
        finally:
            for number in NODES:  # the next test's are empty
                self.kill_step(number)

    def story(self, directory: Path) -> str:
        """What the user's commands, and the daemons lately, wrote."""
        files = [*sorted(directory.glob("*.out")), *sorted(directory.glob("*.err"))]
        told = [f"--- {file.name}\n{read(file)}" for file in files]
        logs = sorted(self._directory.glob("slurm*.log"))
        return "\n".join([*told, *(f"--- {log.name}\n{read(log)[-2000:]}" for log in logs)])

    # How it starts.

    def _start(self, host: Host, program: str, *words: str) -> None:
        path = shutil.which(program, path=_ADMINISTRATORS)
        assert path is not None
        with (self._directory / f"{program}.{host.name}.log").open("wb") as log:
            environ = {**os.environ, "SLURM_CONF": str(self._directory / "slurm.conf")}
            daemon = host.popen([path, *words], stdout=log, stderr=log, env=environ)
        self.processes.append(daemon)

    def wait_until(self, is_so: Callable[[], object], what: str, directory: Path) -> None:
        """Poll until that is true."""
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, f"no {what}\n{self.story(directory)}"
            time.sleep(0.05)

    def _wait(self, is_so: Callable[[], object], what: str) -> None:
        self.wait_until(is_so, what, self._directory)


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _name(pid: int) -> str:
    return read(Path(f"/proc/{pid}/comm")).strip()
