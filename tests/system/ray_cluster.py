"""Ray on test hosts: each host a node of its own, with its own address and files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.hosts import Hosts
from tests.system.nodes import alive_on

PORT, DASHBOARD_PORT = 6379, 8265
RAY = str(Path(sys.executable).with_name("ray"))
# What a job of ours consists of; all else on a node is Ray's.
_OURS = (b"rallypoint", b"ray::Shell", b"\0worker.py")


class RayCluster:
    """A context manager: host 1 is the head, with a server for jobs; all have two CPUs."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        # Ray's sockets must have short names, and each node files of its own.
        self._files = Path(tempfile.mkdtemp(prefix="rp-", dir="/tmp"))
        self.address = f"{hosts[1].address}:{PORT}"
        self.environ = {
            **{name: text for name, text in os.environ.items() if not name.startswith("RAY_")},
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "RAY_raylet_start_wait_time_s": "200",  # a busy machine was seen to need more
            "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}",
        }

    def __enter__(self) -> RayCluster:
        try:
            for host in self.hosts.hosts:
                host.run("mount", "-t", "tmpfs", "tmpfs", str(self._files))
            head = ("--head", "--port", str(PORT), "--temp-dir", str(self._files))
            self._ray_start(1, *head, "--dashboard-host", "0.0.0.0")
            with ThreadPoolExecutor() as pool:
                list(pool.map(self.add_node, range(2, len(self.hosts.hosts) + 1)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Its processes end with the hosts."""
        shutil.rmtree(self._files, ignore_errors=True)

    def add_node(self, number: int) -> None:
        """That host becomes a node."""
        self._ray_start(number, "--address", self.address)

    def kill_raylet(self, number: int) -> None:
        """Ray's own process on that host, whose end is the node's."""
        commands = {pid: self._command(pid) for pid in alive_on(self.hosts[number])}
        (pid,) = [pid for pid, text in commands.items() if b"/raylet\0" in text]
        os.kill(pid, signal.SIGKILL)

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """`rallypoint run --on ray`, on the head's host."""
        return self._popen([sys.executable, "-m", "rallypoint", "run", "--on", "ray", *words])

    def python(self, *words: str) -> subprocess.Popen[bytes]:
        """A program of Ray's, on the head's host."""
        return self._popen([sys.executable, *words])

    def job(self, *words: str) -> str:
        """`ray job WORDS`; what it printed."""
        address = f"http://{self.hosts[1].address}:{DASHBOARD_PORT}"
        process = self._popen([RAY, "job", words[0], "--address", address, *words[1:]])
        out, err = process.communicate(timeout=200)
        return out.decode() + err.decode()

    def ours(self, *numbers: int) -> list[int]:
        """The processes of jobs of ours on these hosts, or on all."""
        hosts = [self.hosts[number] for number in numbers] or self.hosts.hosts
        pids = [pid for host in hosts for pid in alive_on(host)]
        return [pid for pid in pids if any(word in self._command(pid) for word in _OURS)]

    def starter(self) -> int:
        """The process of `rallypoint run --on ray`."""
        (pid,) = [pid for pid in self.ours(1) if b"\0--on\0ray\0" in self._command(pid)]
        return pid

    def left_over(self, *numbers: int, within_s: float) -> list[bytes]:
        """What of our jobs is left on these hosts, or on all, after that time."""
        deadline = time.monotonic() + within_s
        while (left := self.ours(*numbers)) and time.monotonic() < deadline:
            time.sleep(0.02)
        return [self._command(pid) for pid in left]

    def find_in_files(self, text: str) -> list[str]:
        """The files of Ray's, on all nodes, that have this text in them."""
        found = []
        for host in self.hosts.hosts:
            command = host.enter("grep", "-rlaF", "--devices=skip", "-e", text, str(self._files))
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            found += done.stdout.splitlines()
        return found

    def _ray_start(self, number: int, *words: str) -> None:
        host = self.hosts[number]
        command = [RAY, "start", "--node-ip-address", host.address, "--num-cpus", "2"]
        process = host.popen(
            [*command, "--object-store-memory", "80000000", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self.environ,
        )
        told, _ = process.communicate(timeout=200)
        assert process.returncode == 0, told.decode()

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        return self.hosts[1].popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environ, "RAY_ADDRESS": self.address},
            cwd=self.directory,
        )

    def _command(self, pid: int) -> bytes:
        try:
            return Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""
