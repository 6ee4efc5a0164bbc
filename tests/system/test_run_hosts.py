"""`rallypoint run --hosts` on test hosts, with a stand-in for ssh: output, statuses, the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SOON_S, need_ipv6
from tests.system.conftest import Launch
from tests.system.nodes import alive_on

from rallypoint.testing.hosts import Hosts
from rallypoint.testing.remote_shell import RemoteShell

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

    def left_over(self, within_s: float = 10.0) -> list[int]:
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


def test_workers_on_three_hosts(starter: Starter) -> None:
    words = ("--nproc-per-node", "1", starter.script(WHO))
    status, out, err = starter.run(*words, hosts="host1,host2:2,host3")
    assert status == 0, err
    expected = ["host1 0/4 0", "host2 1/4 1", "host2 2/4 1", "host3 3/4 2"]
    assert sorted(out.decode().splitlines()) == expected
    assert "starting on 3 hosts, which meet at host1:" in err


def test_a_hostfile(starter: Starter, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host3 slots=2\nhost1  # one\n")
    command = [sys.executable, "-m", "rallypoint", "run", "--hostfile", "hosts"]
    done = subprocess.run(
        [*command, "--rsh", starter.rsh, starter.script(WHO)],
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=100,
    )
    expected = ["host1 2/3 1", "host3 0/3 0", "host3 1/3 0"]
    assert sorted(done.stdout.decode().splitlines()) == expected


def test_only_trouble_is_told_quietly(starter: Starter) -> None:
    status, out, err = starter.run("--quiet", starter.script(WHO))
    assert (status, len(out.splitlines()), err) == (0, 3, "")
    status, _, err = starter.run("--quiet", starter.script(WHO), hosts="host1,host9")
    assert status == 1
    assert "cannot start on host9" in err


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


def test_hosts_by_their_ipv6_addresses(starter: Starter) -> None:
    need_ipv6()
    script = starter.directory / "to"
    script.write_text(
        '#!/bin/sh\ncase $1 in fd77::1) set -- host1 "$@";; *) set -- host2 "$@";; esac\n'
        f'host=$1; shift 2; exec {starter.rsh} $host "$@"\n'
    )
    script.chmod(0o700)
    starter.rsh = str(script)
    status, out, err = starter.run(starter.script(WHO), hosts="[fd77::1]:2,fd77::2")
    assert status == 0, err
    assert sorted(out.decode().split()[::3]) == ["host1", "host1", "host2"]
    assert "meet at [fd77::1]:" in err


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


def test_output_comes_as_it_was_written(starter: Starter) -> None:
    text = r"import os; os.write(1, b'a\0\xff\r\n\rb\n\n' + b'x' * 3_000_000 + b' end')"
    status, out, err = starter.run(starter.script(text), hosts="host1")
    assert status == 0, err
    assert out == b"a\0\xff\r\n\rb\n\n" + b"x" * 3_000_000 + b" end"


def test_lines_of_two_hosts_are_not_torn(starter: Starter) -> None:
    text = f"""
import os, sys
for number in range({LINES}):
    sys.stdout.write(f"{{os.environ['RANK']}} {{number}} " + "x" * 900 + "\\n")
"""
    status, out, err = starter.run(starter.script(text), hosts="host1,host2")
    assert status == 0, err
    lines = [line.split() for line in out.decode().splitlines()]
    assert len(lines) == 2 * LINES
    for rank in ("0", "1"):
        mine = [(int(number), len(rest)) for name, number, rest in lines if name == rank]
        assert mine == [(number, 900) for number in range(LINES)]


def test_a_failure_is_the_status_and_is_told(starter: Starter) -> None:
    text = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("bad thing")
time.sleep(60)
"""
    status, _, err = starter.run(starter.script(text))
    assert status == 1
    assert "rank 1 raised ValueError: bad thing" in err
    assert "ending the job" not in err  # the launchers did, by themselves


def test_what_is_wrong_everywhere_is_refused_here(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rallypoint", "run", "--hosts", "a,b", "--rsh", "false"]
    for words, sentence in (
        (["missing.py"], "script 'missing.py' does not exist"),
        (["--standalone", "x"], "leave out --standalone"),
        (["--nnodes", "9", "x"], "--nnodes is 9, which is more than the number of hosts, 2"),
    ):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
        assert done.stderr.count("\n") == 1


def test_a_host_that_is_not_there_is_named_before_anything_runs(starter: Starter) -> None:
    script = starter.script(STAYS)
    status, _, err = starter.run(script, hosts="host1,host9,host2")
    assert status == 1
    assert err.startswith("rallypoint run: cannot start on host9: cannot resolve the name host9; ")
    assert err.count("\n") == 1
    assert list(starter.directory.glob("up.*")) == []


def test_with_a_fewest_it_goes_on_without_that_host(starter: Starter) -> None:
    status, out, err = starter.run("--nnodes", "2:", starter.script(WHO), hosts="host9,host1,host2")
    assert status == 0, err
    assert "going on without host9: cannot resolve the name host9; " in err
    assert sorted(line.split()[1] for line in out.decode().splitlines()) == ["0/2", "1/2"]


def test_a_host_without_this_directory_is_named(starter: Starter, tmp_path: Path) -> None:
    work = tmp_path / "data" / "work"
    work.mkdir(parents=True)
    (work / "worker.py").write_text(WHO)
    starter.hosts[2].run("mount", "-t", "tmpfs", "tmpfs", str(work.parent))
    status, out, err = starter.run("worker.py", cwd=work)
    assert (status, out) == (1, b"")
    assert f"cannot start on host2: cannot work in {work} there (No such file or directory)" in err


def test_a_host_without_this_python_is_named(starter: Starter) -> None:
    script = starter.script(WHO)
    empty = starter.directory / "empty"
    empty.mkdir()
    starter.hosts[2].run("mount", "--bind", str(empty), str(Path(sys.executable).parent))
    status, out, err = starter.run(script)
    assert (status, out) == (1, b"")
    assert "cannot start on host2: " in err
    assert f"{sys.executable} must exist on all hosts, with Rallypoint installed" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_all_workers(starter: Starter, number: signal.Signals) -> None:
    """A launcher may hear of it from another one first, and sends its workers a SIGTERM then."""
    process = starter.start("--shutdown-timeout", "3", starter.script(STAYS))
    starter.wait_for("up.host1.0", "up.host2.0", "up.host3.0")
    process.send_signal(number)
    status, _, err = ended(process)
    assert status == 128 + number, err
    got = {path.name.removeprefix("got.") for path in starter.directory.glob("got.*")}
    assert any(name.startswith(f"{int(number)}.") for name in got)
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


def test_a_signal_while_it_connects(starter: Starter) -> None:
    starter.rsh = "sh -c 'sleep 600'"
    process = starter.start("--verbose", starter.script(STAYS))
    deadline = time.monotonic() + 60
    while not Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143


def test_nothing_is_left_when_what_holds_a_launcher_is_killed(starter: Starter) -> None:
    words = ("--shutdown-timeout", "0.5", starter.script(STAYS))
    process = starter.start(*words, hosts="host1,host2")
    starter.wait_for("up.host1.0", "up.host2.0")
    for pid in alive_on(starter.hosts[1]):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except FileNotFoundError:  # it has ended since, with the one that was killed
            continue
        if b"rallypoint.cli.remote.node" in command and command[0].endswith(b"python"):
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


def test_a_job_that_needs_a_host_that_dies_ends_everywhere(starter: Starter) -> None:
    process = starter.start("--shutdown-timeout", "0.5", starter.script(STAYS))
    starter.wait_for("up.host1.0", "up.host2.0", "up.host3.0")
    starter.hosts[3].kill()
    status, _, err = ended(process)
    assert status == 1, err
    assert "lost the connection to host3" in err
    assert "ending the job, as only 2 of the 3 required hosts are left" in err


def test_this_machine_needs_no_ssh(launch: Launch) -> None:
    name = os.uname().nodename
    words = ("--rsh", "false", "--nproc-per-node", "2", launch.script(WHO))
    for host in ("localhost", name):
        assert launch.run("--hosts", host, *words) == 0, launch.err
        assert sorted(launch.out.splitlines()) == [f"{name} 0/2 0", f"{name} 1/2 0"]
    assert launch.run("--hosts", "localhost", *words, launcher=("-m", "rallypoint.launch")) == 0
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
