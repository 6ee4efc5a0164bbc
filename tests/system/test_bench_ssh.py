"""`rallypoint bench --hosts` over ssh itself: hosts with an sshd, and keys."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.nodes import children
from tests.system.ssh_hosts import SshHosts, ssh_hosts
from tests.system.test_bench_operations import rows_of

pytestmark = pytest.mark.system


class Bench:
    """Runs `rallypoint bench --hosts host1,host2` on host3."""

    def __init__(self, hosts: SshHosts) -> None:
        self.hosts = hosts

    def start(self, *words: str, ssh: str = "") -> subprocess.Popen[bytes]:
        """With more options for ssh."""
        rsh = self.hosts.rsh(ssh)
        return self.hosts.rallypoint("bench", *words, "--hosts", "host1,host2", "--rsh", rsh)

    def run(self, *words: str, ssh: str = "") -> tuple[int, str, str]:
        """The exit status, and what it printed."""
        process = self.start(*words, ssh=ssh)
        out, err = process.communicate(timeout=100)
        return process.returncode, out.decode(), err.decode()


@pytest.fixture
def bench(needs_hosts: None, tmp_path: Path) -> Iterator[Bench]:
    with ssh_hosts(3, tmp_path) as hosts:
        yield Bench(hosts)


def test_two_hosts_of_two(bench: Bench) -> None:
    words = ("--nproc-per-node", "2", "--sizes", "24,64K", "--rounds", "2")
    status, out, err = bench.run("all_reduce", *words)
    assert status == 0, err
    assert "4 ranks on 2 hosts" in out
    assert [row[7] for row in rows_of(out)] == ["0", "0"]
    assert bench.hosts.left_over() == []


def test_who_is_not_let_in_is_told_what_ssh_says(bench: Bench) -> None:
    key = f"-i {bench.hosts.directory / 'other_key'} -o IdentityFile=none"
    status, _, err = bench.run(
        "barrier", ssh=f"-F none -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no {key}"
    )
    assert status == 1
    assert "host1: the connection ended" in err
    assert "Permission denied" in err


def test_nothing_is_left_when_it_is_killed(bench: Bench) -> None:
    process = bench.start("all_reduce", "--sizes", "4M", "--rounds", "100000")
    assert process.stdout is not None
    assert any(b"bytes" in line for line in process.stdout)
    for pid in children(process.pid):  # itself, below what has entered the host
        os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    assert bench.hosts.left_over() == []
