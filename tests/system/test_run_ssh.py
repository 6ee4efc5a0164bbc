"""`rallypoint run --hosts` over ssh itself, on three hosts with an sshd."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.system.nodes import children
from tests.system.ssh_hosts import SshHosts, ssh_hosts
from tests.system.test_run_hosts import STAYS, WHO

pytestmark = pytest.mark.system

UP = [f"up.host{number}.0" for number in (1, 2, 3)]


@pytest.fixture
def hosts(needs_hosts: None, tmp_path: Path) -> Iterator[SshHosts]:
    with ssh_hosts(4, tmp_path) as hosts:
        (tmp_path / "stays.py").write_text(STAYS)
        yield hosts


def start(
    hosts: SshHosts, *words: str, names: str = "host1,host2,host3", ssh: str = ""
) -> subprocess.Popen[bytes]:
    """With more options for ssh."""
    rsh = hosts.rsh("-o ServerAliveInterval=1", ssh)
    environ = {"OMP_NUM_THREADS": "1"}
    return hosts.rallypoint("run", "--hosts", names, "--rsh", rsh, *words, environ=environ)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out.decode(), err.decode()


def wait_until_up(hosts: SshHosts) -> None:
    deadline = time.monotonic() + 60
    while not all((hosts.directory / name).exists() for name in UP):
        assert time.monotonic() < deadline, list(hosts.directory.iterdir())
        time.sleep(0.01)


def send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the starter, below what has entered the host."""
    for pid in children(process.pid):
        os.kill(pid, number)


def test_where_it_is_started_may_be_one_of_the_hosts(hosts: SshHosts) -> None:
    """For which it needs no ssh: there is no sshd on host4."""
    (hosts.directory / "who.py").write_text(WHO)
    status, out, err = ended(start(hosts, "who.py", names="host4:2,host1"))
    assert status == 0, err
    assert sorted(out.splitlines()) == ["host1 2/3 1", "host4 0/3 0", "host4 1/3 0"]


def test_ctrl_c(hosts: SshHosts) -> None:
    process = start(hosts, "--shutdown-timeout", "0.5", "stays.py")
    wait_until_up(hosts)
    send(process, signal.SIGINT)
    status, _, err = ended(process)
    assert status == 130, err
    got = {path.name[-7:] for path in hosts.directory.glob("got.*")}
    assert got == {"host1.0", "host2.0", "host3.0"}
    assert hosts.left_over() == []


@pytest.mark.repeated
def test_nothing_is_left_when_the_starter_is_killed(hosts: SshHosts) -> None:
    """Though its workers ignore SIGTERM."""
    process = start(hosts, "stays.py")
    wait_until_up(hosts)
    send(process, signal.SIGKILL)
    process.communicate(timeout=30)
    assert hosts.left_over(within_s=1.0 + SOON_S) == []


def test_hosts_that_cannot_be_reached_are_named_with_what_ssh_says(hosts: SshHosts) -> None:
    send(hosts.servers[2], signal.SIGKILL)
    stranger = (
        "-F none -o UserKnownHostsFile=/dev/null -o StrictHostKeyChecking=no"
        f" -i {hosts.directory / 'other_key'} -o IdentityFile=none"
    )
    for names, ssh, told in (
        ("host1,host2", "", "host2: ssh: connect to host host2 port 22: Connection refused;"),
        ("host1,host7", "", "host7: ssh: Could not resolve hostname host7: "),
        ("root@host3", stranger, "host3: root@host3: Permission denied (publickey"),
    ):
        status, _, err = ended(start(hosts, "stays.py", names=names, ssh=ssh))
        assert status == 1
        assert err.startswith(f"rallypoint run: cannot start on {told}"), err
        assert "; ssh ended with status 255\n" in err
        assert err.count("\n") == 1
        assert hosts.left_over() == []
    assert not list(hosts.directory.glob("up.*"))
