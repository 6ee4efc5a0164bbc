"""docs/exit-statuses.md: each status of its table, from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.system import everyday
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[2] / "docs/exit-statuses.md"


@pytest.mark.everyday
def test_the_table_has_these_and_no_others() -> None:
    """128 + n is tested by test_launch_end.py."""
    rows = re.findall(r"^\| (\S[^|]*) \|", PAGE.read_text(), re.MULTILINE)
    assert rows == ["Status", "0", "1", "2", "3", "128 + n"]


@pytest.mark.everyday
def test_one_machine(launch: Launch) -> None:
    assert launch.run(launch.script("pass")) == 0
    assert launch.run(launch.script("raise SystemExit(7)")) == 1
    assert launch.run("--nproc-per-node", "many", launch.script("pass")) == 2
    assert launch.run("missing.py") == 2


class Nodes:
    """Agents on this machine, by name, of jobs at one endpoint."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.flags = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, text: str, *flags: str) -> None:
        script = self.directory / f"{name}.py"
        script.write_text(text)
        words = everyday.patient([*self.flags, *flags, str(script)])
        command = [sys.executable, "-m", "rallypoint", "run", *words]
        with (self.directory / f"err.{name}").open("wb") as err:
            self.processes[name] = subprocess.Popen(command, cwd=self.directory, stderr=err)

    def said(self, name: str) -> str:
        return (self.directory / f"err.{name}").read_text()

    def status(self, name: str) -> int:
        return self.processes[name].wait(60)

    def wait_for(self, *names: str) -> None:
        self._wait_until(lambda: all((self.directory / name).exists() for name in names))

    def wait_until_said(self, names: tuple[str, ...], text: str) -> None:
        """By one of them."""
        self._wait_until(lambda: any(text in self.said(name) for name in names))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, [self.said(each) for each in self.processes]
            time.sleep(0.02)


@pytest.fixture
def nodes(tmp_path: Path, free_port: int) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, free_port)
    yield nodes
    for process in nodes.processes.values():
        if process.poll() is None:
            process.kill()
        process.wait()


WAITS = """
import pathlib, time
pathlib.Path('{name}.up').touch()
while not pathlib.Path('{go}').exists(): time.sleep(0.01)
"""


@pytest.mark.everyday
def test_nothing_ran_here(nodes: Nodes) -> None:
    flags = ("--nnodes", "2", "--rdzv-conf", "last_call_timeout=0.2", "--verbose")
    for name in ("a", "b"):
        nodes.start(name, WAITS.format(name=name, go="go"), *flags)
    nodes.wait_for("a.up", "b.up")
    nodes.start("c", "open('c.ran', 'w')", *flags)
    nodes.wait_until_said(("a", "b"), "waits for the next round")
    (nodes.directory / "go").touch()
    assert [nodes.status(name) for name in ("a", "b", "c")] == [0, 0, 3]
    assert not (nodes.directory / "c.ran").exists()
    assert "the job ended before this node could take part" in nodes.said("c")


@pytest.mark.repeated
def test_two_jobs_in_sequence_with_a_slow_node(nodes: Nodes) -> None:
    """While the first job's coordinator waits for it, a node of the second one calls there."""
    flags = ("--nnodes", "3", "--rdzv-conf", "last_call_timeout=0.2", "--verbose")
    nodes.start("a", WAITS.format(name="a", go="go"), *flags)
    nodes.wait_until_said(("a",), "coordinates the job")
    for name in ("b", "slow"):
        nodes.start(name, f"open('{name}.ran', 'w')", *flags)
    nodes.wait_for("a.up", "b.ran", "slow.ran")
    nodes.wait_until_said(("slow",), "nothing is left running")
    time.sleep(0.3)  # its word has come
    os.kill(nodes.processes["slow"].pid, signal.SIGSTOP)
    (nodes.directory / "go").touch()
    nodes.wait_until_said(("a",), "agreement 2: succeeded")
    nodes.start("b2", "open('b2.ran', 'w')", *flags)
    assert (nodes.status("a"), nodes.status("b")) == (0, 0)
    assert nodes.processes["b2"].poll() is None, nodes.said("b2")
    os.kill(nodes.processes["slow"].pid, signal.SIGKILL)
    for name in ("a2", "c2"):
        nodes.start(name, f"open('{name}.ran', 'w')", *flags)
    assert [nodes.status(name) for name in ("a2", "b2", "c2")] == [0, 0, 0]
    assert (nodes.directory / "b2.ran").exists()
