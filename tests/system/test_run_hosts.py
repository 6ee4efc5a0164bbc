"""`rallypoint run --hosts` on test hosts, with a stand-in for ssh: output, statuses, the end.

What is decided when is held by tests/unit/cli/remote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SOON_S
from tests.hosts import Hosts
from tests.remote_shell import RemoteShell
from tests.system import everyday
from tests.system.conftest import Launch
from tests.system.nodes import alive_on

pytestmark = pytest.mark.system

WHO = """
import os, sys
e = os.environ
text = f"{os.uname().nodename} {e['RANK']}/{e['WORLD_SIZE']} {e['GROUP_RANK']}"
sys.stdout.write(text + "\\n")  # at once, as two of a host share its output
"""
# Says that it is up, in a file, and stays; SIGINT and SIGTERM are noted, and change nothing.
STAYS = """
import os, pathlib, signal, time
e = os.environ
name = f"{os.uname().nodename}.{e['LOCAL_RANK']}"
def note(number, _):
    pathlib.Path(f"got.{number}.{name}").touch()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
path = pathlib.Path(f"part.{name}")
path.write_text(f"{e['RANK']}/{e['WORLD_SIZE']}")
path.rename(f"up.{name}")
while not os.path.exists("go"):
    time.sleep(0.01)
"""
LINES = 2000


class Starter:
    """Runs `rallypoint run --hosts ...` outside of the hosts, in a directory that all share."""

    def __init__(self, hosts: Hosts, shell: RemoteShell, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self.rsh = " ".join(shell.command)

    def script(self, text: str) -> str:
        path = self.directory / "worker.py"
        path.write_text(text)
        return path.name

    def start(
        self,
        *words: str,
        hosts: str = "host1,host2,host3",
        cwd: Path | None = None,
        environ: dict[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rallypoint", "run", "--hosts", hosts, "--rsh", self.rsh]
        command += ["--rdzv-conf", everyday.PATIENT] if everyday.is_on else []
        return subprocess.Popen(
            [*command, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd or self.directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
        )

    def run(
        self, *words: str, hosts: str = "host1,host2,host3", cwd: Path | None = None
    ) -> tuple[int, bytes, str]:
        """The exit status, and what it printed."""
        return ended(self.start(*words, hosts=hosts, cwd=cwd))

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 60
        while not all((self.directory / name).exists() for name in names):
            assert time.monotonic() < deadline, (names, list(self.directory.iterdir()))
            time.sleep(0.01)

    def left_over(self, within_s: float = everyday.LEAST_BOUND_S) -> list[int]:
        """Processes that are left on the hosts."""
        deadline = time.monotonic() + within_s
        while left := [pid for host in self.hosts.hosts for pid in alive_on(host)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return left


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes, str]:
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err.decode()


@pytest.fixture
def starter(needs_hosts: None, tmp_path: Path) -> Iterator[Starter]:
    with Hosts(3) as hosts, RemoteShell(hosts, tmp_path) as shell:
        starter = Starter(hosts, shell, tmp_path)
        yield starter
        assert starter.left_over() == []


@pytest.mark.everyday
def test_workers_on_three_hosts(starter: Starter) -> None:
    words = ("--nproc-per-node", "1", starter.script(WHO))
    status, out, err = starter.run(*words, hosts="host1,host2:2,host3")
    assert status == 0, err
    expected = ["host1 0/4 0", "host2 1/4 1", "host2 2/4 1", "host3 3/4 2"]
    assert sorted(out.decode().splitlines()) == expected
    assert "starting on 3 hosts, rendezvous at host1:" in err


def test_what_a_login_shell_says_is_no_output(starter: Starter, tmp_path: Path) -> None:
    noisy = tmp_path / "noisy"
    noisy.write_text(f'#!/bin/sh\necho welcome\necho "no quota" >&2\nexec {starter.rsh} "$@"\n')
    noisy.chmod(0o700)
    starter.rsh = f"{noisy} {{host}}"
    status, out, err = starter.run(starter.script(WHO), hosts="host1,host2")
    assert (status, len(out.splitlines())) == (0, 2), err
    assert "quota" not in err
    status, _, err = starter.run(starter.script(WHO), hosts="host9,host1")
    assert "cannot start on host9: cannot resolve the name host9; noisy ended with st" in err


def test_ports_of_a_range(starter: Starter) -> None:
    text = "import os, sys; print(os.environ['MASTER_PORT'], file=sys.stderr)"
    status, _, err = starter.run("--port-range", "21000-21009", starter.script(text))
    assert status == 0, err
    ports = [word.strip(",").rpartition(":")[2] for word in err.splitlines()[0].split()[-3:]]
    ports += err.splitlines()[1:]
    assert len(ports) == 6
    assert all(21000 <= int(port) <= 21009 for port in ports), err


def test_variables_and_the_token(starter: Starter) -> None:
    """The token is never a word of a command, and workers get a secret of the round instead."""
    text = "import os; print(os.environ['MINE'], os.environ['NCCL_DEBUG'], flush=True)\n" + STAYS
    given = {"RALLYPOINT_TOKEN": "sesame-open", "MINE": "a 'b", "NCCL_DEBUG": "WARN"}
    process = starter.start("--env", "MINE", starter.script(text), environ=given)
    starter.wait_for("up.host1.0", "up.host2.0", "up.host3.0")
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert b"sesame-open" not in path.read_bytes()
        except OSError:
            continue  # it has ended
    (starter.directory / "go").touch()
    status, out, err = ended(process)
    assert (status, out) == (0, b"a 'b WARN\n" * 3), err


@pytest.mark.exact
def test_output_comes_as_it_was_written(starter: Starter) -> None:
    """And quietly, nothing else does."""
    text = r"import os; os.write(1, b'a\0\xff\r\n\rb\n\n' + b'x' * 3_000_000 + b' end')"
    status, out, err = starter.run("--quiet", starter.script(text), hosts="host1")
    assert (status, err) == (0, "")
    assert out == b"a\0\xff\r\n\rb\n\n" + b"x" * 3_000_000 + b" end"


@pytest.mark.exact
def test_lines_of_two_hosts_are_not_torn(starter: Starter) -> None:
    text = f"""
import os, sys
for number in range({LINES}):
    sys.stdout.write(f"{{os.environ['RANK']}} {{number}} " + "x" * 900 + "\\n")
"""
    words = ("--rdzv-conf", everyday.PATIENT, starter.script(text))
    status, out, err = starter.run(*words, hosts="host1,host2")
    assert status == 0, err
    lines = [line.split() for line in out.decode().splitlines()]
    assert len(lines) == 2 * LINES
    for rank in ("0", "1"):
        mine = [(int(number), len(rest)) for name, number, rest in lines if name == rank]
        assert mine == [(number, 900) for number in range(LINES)]


@pytest.mark.everyday
def test_a_failure_is_the_status_and_is_told(starter: Starter) -> None:
    text = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("bad thing")
time.sleep(600)
"""
    status, _, err = starter.run(starter.script(text))
    assert status == 1
    assert "rank 1 raised ValueError: bad thing" in err


def test_a_host_that_is_not_there_is_named_before_anything_runs(starter: Starter) -> None:
    script = starter.script(STAYS)
    status, _, err = starter.run("--quiet", script, hosts="host1,host9,host2")
    assert status == 1
    assert err.startswith("rallypoint run: cannot start on host9: cannot resolve the name host9; ")
    assert err.count("\n") == 1
    assert list(starter.directory.glob("up.*")) == []


def test_a_host_without_this_directory_is_named(starter: Starter, tmp_path: Path) -> None:
    work = tmp_path / "data" / "work"
    work.mkdir(parents=True)
    (work / "worker.py").write_text(WHO)
    starter.hosts[2].run("mount", "-t", "tmpfs", "tmpfs", str(work.parent))
    status, out, err = starter.run("worker.py", cwd=work)
    assert (status, out) == (1, b"")
    assert f"cannot start on host2: cannot work in {work} there (No such file or directory)" in err


def test_a_signal_reaches_all_workers(starter: Starter) -> None:
    process = starter.start("--shutdown-timeout", "3", starter.script(STAYS))
    starter.wait_for("up.host1.0", "up.host2.0", "up.host3.0")
    process.send_signal(signal.SIGTERM)
    status, _, err = ended(process)
    assert status == 128 + signal.SIGTERM, err
    got = {path.name.removeprefix("got.") for path in starter.directory.glob("got.*")}
    assert {name.partition(".")[2] for name in got} == {"host1.0", "host2.0", "host3.0"}
    assert "interrupted while" not in err


def test_a_second_ctrl_c_ends_it_at_once(starter: Starter) -> None:
    process = starter.start("--shutdown-timeout", "600", starter.script(STAYS))
    starter.wait_for("up.host1.0", "up.host2.0", "up.host3.0")
    process.send_signal(signal.SIGINT)
    while len({path.name[-7:] for path in starter.directory.glob("got.*")}) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    status, _, err = ended(process)
    assert status == 130, err


def test_nothing_is_left_when_what_holds_a_launcher_is_killed(starter: Starter) -> None:
    words = ("--shutdown-timeout", "0.5", starter.script(STAYS))
    process = starter.start(*words, hosts="host1,host2")
    starter.wait_for("up.host1.0", "up.host2.0")
    for pid in alive_on(starter.hosts[1]):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:  # it has ended since, with the one that was killed
            continue
        if b"rallypoint.cli.remote.remote_node" in command and command[0].endswith(b"python"):
            os.kill(pid, signal.SIGKILL)
    status, _, err = ended(process)
    assert (status, "lost the connection to host1" in err) == (1, True), err


@pytest.mark.repeated
def test_nothing_is_left_when_the_starter_is_killed(starter: Starter) -> None:
    """Though its workers ignore SIGTERM."""
    process = starter.start(starter.script(STAYS), hosts="host1:2,host2,host3")
    starter.wait_for("up.host1.0", "up.host1.1", "up.host2.0", "up.host3.0")
    process.kill()
    process.communicate()
    assert starter.left_over(within_s=1.0 + SOON_S) == []


def test_a_job_goes_on_without_a_host_that_dies(starter: Starter) -> None:
    words = ("--nnodes", "2:3", "--shutdown-timeout", "0.5")
    process = starter.start(*words, starter.script(STAYS))
    starter.wait_for("up.host1.0", "up.host2.0", "up.host3.0")
    before = (starter.directory / "up.host2.0").read_text()
    assert before == "1/3"
    starter.hosts[1].kill()
    deadline = time.monotonic() + 60
    while (starter.directory / "up.host2.0").read_text() == before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (starter.directory / "go").touch()
    status, _, err = ended(process)
    assert status == 0, err
    assert "lost the connection to host1" in err


@pytest.mark.everyday
def test_this_machine_needs_no_ssh(launch: Launch) -> None:
    name = os.uname().nodename
    words = ("--rsh", "false", "--nproc-per-node", "2", launch.script(WHO))
    assert launch.run("--hosts", "localhost", *words) == 0, launch.err
    assert sorted(launch.out.splitlines()) == [f"{name} 0/2 0", f"{name} 1/2 0"]
    assert launch.run("--hosts", name, *words, launcher=("-m", "rallypoint.launch")) == 0
    assert launch.left_files() == []


def test_a_starter_of_workers_here_is_killed(launch: Launch) -> None:
    launch.start("--hosts", "localhost:2", launch.script(STAYS))
    launch.wait_for("up.*", 2)
    assert launch.process is not None
    launch.process.kill()
    launch.process.wait()
    assert launch.left_over(within_s=1.0 + SOON_S) == []


def test_variables_that_are_flags_are_read_once(launch: Launch) -> None:
    """They are in the environment of the launcher, too, where it is on this machine."""
    environ = {"PET_HOSTS": "localhost", "PET_NPROC_PER_NODE": "2", "PET_RSH": "false"}
    assert launch.run(launch.script(WHO), environ=environ) == 0, launch.err
    assert len(launch.out.splitlines()) == 2
