"""`rallypoint bench --hosts` on test hosts, with a stand-in for ssh: the table, peers, the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.nodes import alive_on
from tests.system.test_bench_operations import rows_of

from rallypoint.cli.benchmark.environments import default_cache
from rallypoint.testing.hosts import Hosts
from rallypoint.testing.remote_shell import RemoteShell

pytestmark = pytest.mark.system

SIZES = ("24", "1200", str(4 << 20))
# The hosts are one machine: no MPI is to tie its ranks to the same first core.
SHARE = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "I_MPI_PIN": "off",
}
ENDLESS = ("--sizes", "4M", "--rounds", "100000")


class Bench:
    """Runs `rallypoint bench --hosts host1,host2` from outside."""

    def __init__(self, hosts: Hosts, shell: RemoteShell, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self._rsh = " ".join(shell.command)

    def start(self, *words: str, hosts: str = "host1,host2") -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rallypoint", "bench", *words]
        return subprocess.Popen(
            [*command, "--hosts", hosts, "--rsh", self._rsh],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
        )

    def run(self, *words: str, hosts: str = "host1,host2") -> tuple[int, str, str]:
        """The exit status, and what it printed."""
        process = self.start(*words, hosts=hosts)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    def start_and_wait(self, *words: str) -> subprocess.Popen[str]:
        """Until it measures."""
        process = self.start(*words)
        assert process.stdout is not None
        assert any("bytes" in line for line in process.stdout), process.communicate()
        time.sleep(0.5)
        return process

    def left_over(self, within_s: float = 10.0) -> list[object]:
        """What is left, on the hosts and in the directory for temporary files."""
        deadline = time.monotonic() + within_s
        while True:
            left: list[object] = [pid for host in self.hosts.hosts for pid in alive_on(host)]
            left += self.directory.glob("rallypoint-bench-*")
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.05)


@pytest.fixture
def bench(needs_hosts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Hosts(2) as hosts, RemoteShell(hosts, tmp_path) as shell:
        yield Bench(hosts, shell, tmp_path)


def test_ours_on_two_hosts_of_two(bench: Bench) -> None:
    words = ("--nproc-per-node", "2", "--sizes", "24,1200,4M", "--rounds", "2", "--pin")
    status, out, err = bench.run("all_reduce", *words, "--json", "found.json")
    assert status == 0, err
    assert "4 ranks on 2 hosts" in out
    assert "host1, host2: " in out
    assert [(row[0], row[7]) for row in rows_of(out)] == [(size, "0") for size in SIZES]
    found = json.loads((bench.directory / "found.json").read_text())
    assert found["request"]["hosts"] == ["host1", "host2"]
    ours = found["rows"][2]["results"]["rallypoint"]
    assert ours["busbw_gb_s"] == pytest.approx(4 * 2**20 * 1.5 / ours["time_us"] / 1e3)
    assert bench.left_over() == []


@pytest.mark.parametrize("operation", ["send", "all_gather", "reduce_scatter", "barrier"])
def test_other_operations(bench: Bench, operation: str) -> None:
    status, out, err = bench.run(operation, "--sizes", "1200", "--rounds", "1")
    assert status == 0, err
    assert [row[7] for row in rows_of(out)] == ["0"]


@pytest.mark.needs_torch
def test_gloo_takes_part(bench: Bench) -> None:
    words = ("--nproc-per-node", "2", "--sizes", "8,64K", "--rounds", "2", "--vs", "gloo")
    status, out, err = bench.run("all_reduce", *words)
    assert status == 0, err
    assert [float(row[8]) > 0 for row in rows_of(out)] == [True, True]


@pytest.mark.parametrize("name", ["mpich", "openmpi", "intelmpi"])
def test_mpis_take_part(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SHARE.items():
        monkeypatch.setenv(variable, value)
    if not (default_cache() / name / "made").exists():
        pytest.skip(f"{name} is not installed: rallypoint bench all_reduce --vs {name} --get-mpi")
    status, out, err = bench.run("all_reduce", "--sizes", "8,64K", "--rounds", "1", "--vs", name)
    assert status == 0, err
    assert f"{name} (" in out
    assert [float(row[8]) > 0 for row in rows_of(out)] == [True, True]
    assert bench.left_over() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_it_nothing_is_left(bench: Bench, number: signal.Signals) -> None:
    process = bench.start_and_wait("all_reduce", *ENDLESS)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    if number == signal.SIGKILL:  # what it had for itself stays, and a host may still have begun
        deadline = time.monotonic() + 20
        while any(bench.directory.glob("rallypoint-bench-*")) and time.monotonic() < deadline:
            for path in bench.directory.glob("rallypoint-bench-*/[01]"):
                path.unlink(missing_ok=True)
            for path in bench.directory.glob("rallypoint-bench-*"):
                with contextlib.suppress(OSError):  # it is not empty yet
                    path.rmdir()
            time.sleep(0.1)
    else:
        assert process.returncode == 128 + number
        assert "Traceback" not in err
    assert bench.left_over() == []


def test_a_host_that_dies_is_named(bench: Bench) -> None:
    process = bench.start_and_wait("all_reduce", *ENDLESS)
    bench.hosts[2].kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "host2: the connection ended" in err


def test_what_cannot_be(bench: Bench) -> None:
    for hosts, words, status, message in (
        ("host1,host9", (), 1, "host9: the connection ended: "),
        ("host1,host9", (), 1, "| cannot resolve the name host9"),
        ("host1,host1", (), 2, "--hosts names host1 twice"),
        ("host1:2", (), 2, "--nproc-per-node gives the number of ranks on each host"),
        ("host1,localhost", (), 2, "--hosts localhost is a name that other hosts cannot resolve"),
        (",", (), 2, "--hosts names no host"),
        ("host1,host2", ("--algorithm", "none"), 1, "there is no algorithm 'none'"),
        ("host1", ("--vs", "mpich", "--mpi-env", "mpich=/none"), 1, "host1: --mpi-env mpich=/none"),
    ):
        found, _, err = bench.run("all_reduce", "--sizes", "8", *words, hosts=hosts)
        assert (found, message in err) == (status, True), err
        assert bench.left_over() == []


def test_a_shell_that_is_not_there(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "rallypoint",
        "bench",
        "barrier",
        "--hosts",
        "elsewhere.invalid",
    ]
    for words, message in (
        (["--rsh", "no-such-shell"], "cannot run no-such-shell (No such file or directory)"),
        (["--rsh", "false"], "elsewhere.invalid: the connection ended: false elsewhere.invalid"),
        (["--rsh", "echo hello {host}"], "the connection ended: echo hello elsewhere.invalid"),
    ):
        done = subprocess.run(
            [*command, *words],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr
        assert list(tmp_path.iterdir()) == []
