"""`rallypoint bench --hosts` on test hosts, with a stand-in for ssh: the table, peers, the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hosts import Hosts
from tests.remote_shell import RemoteShell
from tests.system.nodes import alive_on
from tests.system.test_bench_operations import rows_of

from rallypoint.lab.bench.contenders import default_cache

pytestmark = pytest.mark.system

SIZES = ("24", "1200", str(4 << 20))
# The hosts are one machine: no MPI is to tie its ranks to the same first core.
SHARE = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "I_MPI_PIN": "off",
}


class Bench:
    """Runs `rallypoint bench --hosts host1,host2` from outside."""

    def __init__(self, hosts: Hosts, shell: RemoteShell, directory: Path) -> None:
        self.hosts = hosts
        self.directory = directory
        self._rsh = " ".join(shell.command)

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "rallypoint", "bench", *words]
        return subprocess.Popen(
            [*command, "--hosts", "host1,host2", "--rsh", self._rsh],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        """The exit status, and what it printed."""
        process = self.start(*words)
        out, err = process.communicate(timeout=100)
        return process.returncode, out, err

    def start_and_wait(self, *words: str) -> subprocess.Popen[str]:
        """Until it measures."""
        process = self.start(*words)
        assert process.stdout is not None
        assert any("bytes" in line for line in process.stdout), process.communicate()
        return process

    def left_over(self) -> list[object]:
        """What is left, on the hosts and in the directory for temporary files."""
        deadline = time.monotonic() + 60
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


@pytest.mark.needs_torch
def test_gloo_takes_part(bench: Bench) -> None:
    words = ("--nproc-per-node", "2", "--sizes", "8,64K", "--rounds", "2", "--vs", "gloo")
    status, out, err = bench.run("all_reduce", *words)
    assert status == 0, err
    assert [float(row[8]) > 0 for row in rows_of(out)] == [True, True]


def test_mpis_take_part(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in SHARE.items():
        monkeypatch.setenv(variable, value)
    for name in ("mpich", "openmpi", "intelmpi"):
        if not (default_cache() / name / "made").exists():
            pytest.skip(
                f"{name} is not installed: rallypoint bench all_reduce --vs {name} --get-mpi"
            )
        words = ("--sizes", "8,64K", "--rounds", "1", "--vs", name)
        status, out, err = bench.run("all_reduce", *words)
        assert status == 0, err
        assert f"{name} (" in out
        assert [float(row[8]) > 0 for row in rows_of(out)] == [True, True]
        assert bench.left_over() == []


def test_what_ends_it_leaves_nothing(bench: Bench) -> None:
    process = bench.start_and_wait("all_reduce", "--sizes", "4M", "--rounds", "100000")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in err
    assert bench.left_over() == []
