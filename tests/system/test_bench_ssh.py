"""`rallypoint bench --hosts` over ssh itself: hosts with an sshd, and keys."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.nodes import children
from tests.system.test_bench_operations import rows_of

from rallypoint.testing.hosts import Hosts

pytestmark = pytest.mark.system

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
    """host1 and host2 with an sshd each, and host3, from where they are reached."""

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self.hosts = hosts
        self.servers: list[subprocess.Popen[bytes]] = []
        self._directory = directory
        for name in ("host_key", "user_key", "other_key"):
            path = directory / name
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        for name in ("here", "there"):  # for temporary files
            (directory / name).mkdir()
        (directory / "server").write_text(SERVER.format(directory=directory))
        (directory / "client").write_text(CLIENT.format(directory=directory))
        for host in hosts.hosts[:2]:
            host.run("sh", "-c", "mount -t tmpfs tmpfs /run && mkdir /run/sshd")
            assert SSHD is not None
            server = [SSHD, "-D", "-f", str(directory / "server")]
            self.servers.append(host.popen(server, stderr=subprocess.DEVNULL))
            self._await_server(host.address)

    def bench(self, *words: str, ssh: str = "") -> subprocess.Popen[bytes]:
        """`rallypoint bench WORDS` on host3, with more options for ssh."""
        rsh = f"ssh -F {self._directory / 'client'} -o BatchMode=yes {ssh}"
        command = [sys.executable, "-m", "rallypoint", "bench", *words]
        return self.hosts[3].popen(
            [*command, "--hosts", "host1,host2", "--rsh", rsh],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self._directory / "here")},
        )

    def run(self, *words: str, ssh: str = "") -> tuple[int, str, str]:
        """The exit status, and what it printed."""
        process = self.bench(*words, ssh=ssh)
        out, err = process.communicate(timeout=100)
        return process.returncode, out.decode(), err.decode()

    def left_over(self, within_s: float = 10.0) -> list[str]:
        """Processes on host1 and host2 beside the hosts' own, and temporary files there."""
        deadline = time.monotonic() + within_s
        while True:
            left = [path.name for path in (self._directory / "there").iterdir()]
            for host in self.hosts.hosts[:2]:
                found = host.run("ps", "-e", "-ww", "-o", "stat=,args=").splitlines()
                left += [line for line in found if not re.match(HOSTS_OWN, line)]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)

    def _await_server(self, address: str) -> None:
        script = f"import socket; socket.create_connection(('{address}', 22), 1)"
        deadline = time.monotonic() + 20
        while (
            self.hosts[3].popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL).wait()
            != 0
        ):
            assert time.monotonic() < deadline, f"no sshd at {address}"


@pytest.fixture
def ssh_hosts(needs_hosts: None, tmp_path: Path) -> Iterator[SshHosts]:
    if not (SSHD and shutil.which("ssh")):
        pytest.skip("ssh and sshd are not installed: apt install openssh-client openssh-server")
    if os.geteuid() != 0:
        pytest.skip("only root starts an sshd that lets its user in: run as root")
    with Hosts(3) as hosts:
        ready = SshHosts(hosts, tmp_path)
        yield ready
    for server in ready.servers:
        server.wait()


def test_two_hosts_of_two(ssh_hosts: SshHosts) -> None:
    words = ("--nproc-per-node", "2", "--sizes", "24,64K", "--rounds", "2")
    status, out, err = ssh_hosts.run("all_reduce", *words)
    assert status == 0, err
    assert "4 ranks on 2 hosts" in out
    assert [row[7] for row in rows_of(out)] == ["0", "0"]
    assert ssh_hosts.left_over() == []


def test_who_is_not_let_in_is_told_what_ssh_says(ssh_hosts: SshHosts) -> None:
    key = f"-i {ssh_hosts._directory / 'other_key'} -o IdentityFile=none"
    status, _, err = ssh_hosts.run(
        "barrier", ssh=f"-F none -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no {key}"
    )
    assert status == 1
    assert "host1: the connection ended" in err
    assert "Permission denied" in err


def test_nothing_is_left_when_it_is_killed(ssh_hosts: SshHosts) -> None:
    process = ssh_hosts.bench("all_reduce", "--sizes", "4M", "--rounds", "100000")
    assert process.stdout is not None
    assert any(b"bytes" in line for line in process.stdout)
    for pid in children(process.pid):  # itself, below what has entered the host
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert ssh_hosts.left_over() == []
