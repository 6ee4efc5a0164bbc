"""Test hosts with a real sshd each, and one more from where they are reached."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.hosts import Host, Hosts

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
SERVER = """\
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/user_key.pub
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
PermitRootLogin yes
SetEnv TMPDIR={directory}/there
"""
CLIENT = """\
Host *
  User root
  IdentityFile {directory}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {directory}/known_hosts
  StrictHostKeyChecking accept-new
"""


HOSTS_OWN = r"Z|\S+ +(sleep infinity|sshd: .*\[listener\]|ps -e)"


class SshHosts:
    """host1 to the last but one with an sshd each; the last one, from where they are reached.

    Attributes:
        servers: by number, the sshd of each; what has entered the host to start it.
        here, there: for temporary files on the last host, and on the others.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.last = hosts.hosts[-1]
        self.servers: dict[int, subprocess.Popen[bytes]] = {}
        self.directory = directory
        self.here, self.there = directory / "here", directory / "there"
        for name in ("host_key", "user_key", "other_key"):
            path = directory / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        for path in (self.here, self.there):
            path.mkdir()
        (directory / "server").write_text(SERVER.format(directory=directory))
        (directory / "client").write_text(CLIENT.format(directory=directory))
        for host in self._served:
            host.run("sh", "-c", "mount -t tmpfs tmpfs /run && mkdir /run/sshd")
            assert SSHD is not None
            server = [SSHD, "-D", "-f", str(directory / "server")]
            self.servers[host.number] = host.popen(server, stderr=subprocess.DEVNULL)
            self._await_server(host.address)

    def rsh(self, *options: str) -> str:
        """What to say as --rsh; with more options for ssh."""
        return " ".join(["ssh", "-F", str(self.directory / "client"), "-o BatchMode=yes", *options])

    def rallypoint(
        self, *words: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """`rallypoint WORDS` on the last host."""
        return self.last.popen(
            [sys.executable, "-m", "rallypoint", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.here), **(environ or {})},
            cwd=self.directory,
        )

    def left_over(self, within_s: float = 10.0) -> list[str]:
        """Processes on the others beside the hosts' own, and temporary files there."""
        deadline = time.monotonic() + within_s
        while True:
            left = [path.name for path in self.there.iterdir()]
            for host in self._served:
                with contextlib.suppress(subprocess.CalledProcessError):  # it was killed
                    found = host.run("ps", "-e", "-ww", "-o", "stat=,args=").splitlines()
                    left += [line for line in found if not re.match(HOSTS_OWN, line)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    @property
    def _served(self) -> list[Host]:
        return self.hosts.hosts[:-1]

    def _await_server(self, address: str) -> None:
        script = f"import socket; socket.create_connection(('{address}', 22), 1)"
        deadline = time.monotonic() + 20
        while self.last.popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL).wait():
            assert time.monotonic() < deadline, f"no sshd at {address}"


@contextlib.contextmanager
def ssh_hosts(count: int, directory: Path) -> Iterator[SshHosts]:
    """So many hosts, the last one without an sshd; skips the test where there can be none."""
    if not (SSHD and shutil.which("ssh")):
        pytest.skip("ssh and sshd are not installed: apt install openssh-client openssh-server")
    if os.geteuid() != 0:
        pytest.skip("only root starts an sshd that lets its user in: run as root")
    with Hosts(count) as hosts:
        ready = SshHosts(hosts, directory)
        yield ready
    for server in ready.servers.values():
        server.wait()
