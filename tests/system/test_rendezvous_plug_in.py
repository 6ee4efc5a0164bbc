"""A rendezvous that another package brings: for Python programs, and for the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.system.conftest import OURS, Launch
from tests.system.meetings import meet, until

from rallypoint.base.errors import InvalidArgumentError, RendezvousError
from rallypoint.rendezvous import RendezvousParameters, get_rendezvous_handler

pytestmark = pytest.mark.system

# One group's function makes a handler, the other's returns such a function.
PACKAGE = """
from rallypoint.rendezvous import create_handler
from rallypoint.store.file import FileStore

def make(params):
    return create_handler(FileStore(params.get("path")), params.backend, params)

def maker():
    return make
"""
ENTRY_POINTS = """
[rallypoint.rendezvous]
meet_in_file = their_package:make
broken = their_package:nothing
c10d = their_package:nothing

[torchrun.handlers]
torch_style = their_package:maker
"""
WORKER = """
import os, signal, sys, time
e = os.environ
text = f"{e['TORCHELASTIC_RESTART_COUNT']} {e['RANK']}/{e['WORLD_SIZE']}"
name = f"up.{e['NODE']}.{e['LOCAL_RANK']}"
with open(name + ".new", "w") as file:
    file.write(f"{text} {os.getpid()}")
os.rename(name + ".new", name)
while not os.path.exists("go"):
    time.sleep(0.01)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an installed distribution."""
    folder = tmp_path / "site"
    about = folder / "their_package-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "their_package.py").write_text(PACKAGE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


@pytest.mark.parametrize(
    "name", ["meet_in_file", pytest.param("torch_style", marks=pytest.mark.everyday)]
)
def test_found_by_its_name(
    name: str, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    path = str(tmp_path / "store")
    lease: dict[str, Any] = {"keep_alive_interval": 2, "keep_alive_max_attempt": 15}
    parameters = RendezvousParameters(name, "", "r", 2, 2, path=path, **lease)
    handlers = [get_rendezvous_handler(parameters) for _ in range(2)]
    assert handlers[0].get_backend() == name
    assert sorted(place.rank for place in meet(*handlers)) == [0, 1]
    for handler in handlers:
        handler.shutdown()


def test_what_is_wrong_with_one_is_said(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(package))
    with pytest.raises(RendezvousError, match="'broken', which their-package brings"):
        get_rendezvous_handler(RendezvousParameters("broken", "", "r", 1, 1))
    with pytest.raises(InvalidArgumentError, match=r"c10d, .*meet_in_file, .*torch_style"):
        get_rendezvous_handler(RendezvousParameters("nobody", "", "r", 1, 1))
    with pytest.raises(InvalidArgumentError, match="choose etcd, which uses version 3"):
        get_rendezvous_handler(RendezvousParameters("etcd-v2", "127.0.0.1", "r", 1, 1))
    own = get_rendezvous_handler(RendezvousParameters("c10d", "127.0.0.1:0", "r", 1, 1))
    assert own.shutdown()  # nobody takes our names


class Agents:
    """Launches with --rdzv-backend meet_in_file, each with a name."""

    def __init__(self, directory: Path, package: Path) -> None:
        self.directory = directory
        self._package = package
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        (directory / "worker.py").write_text(WORKER)

    def start(self, name: str, *flags: str, backend: str = "meet_in_file") -> None:
        conf = f"path={self.directory / 'store'},last_call_timeout=1,join_timeout=30"
        words = ["--rdzv-backend", backend, "--rdzv-endpoint", "127.0.0.1:29400", "--rdzv-conf"]
        words += [conf, "--rdzv-id", "r", "--nnodes", "1:2", *flags, "worker.py"]
        with (self.directory / f"output.{name}").open("wb") as out:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *OURS, *words],
                cwd=self.directory,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(self._package),
                    "NODE": name,
                    "TMPDIR": str(self.directory),
                },
            )

    def said(self, name: str) -> str:
        return (self.directory / f"output.{name}").read_text()

    def up(self, worker: str) -> list[str]:
        path = self.directory / f"up.{worker}"
        return path.read_text().split() if path.exists() else ["", "", "0"]

    def wait_for(self, **expected: str) -> None:
        """Until these nodes' first workers have said this."""
        try:
            until(lambda: all(self.up(f"{k}.0")[1] == v for k, v in expected.items()))
        except AssertionError:
            raise AssertionError(self.story()) from None

    def send(self, name: str, number: signal.Signals) -> None:
        self._processes[name].send_signal(number)

    def ended(self, name: str) -> int:
        try:
            return self._processes[name].wait(60)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story()) from None

    def end_all(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def story(self) -> str:
        said = [f"--- {path}\n{path.read_text()}" for path in self.directory.glob("output.*")]
        return "\n".join([*said, str([path.read_text() for path in self.directory.glob("up.*")])])


@pytest.fixture
def agents(tmp_path: Path, package: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path, package)
    yield agents
    agents.end_all()


def test_agents_meet_by_a_plug_in(agents: Agents) -> None:
    agents.start("a", "--nproc-per-node", "2")
    agents.wait_for(a="0/2")
    agents.start("b")
    agents.wait_for(a="0/3", b="2/3")
    assert agents.up("a.0")[0] == agents.up("b.0")[0]
    agents.send("b", signal.SIGKILL)  # its node falls silent
    agents.wait_for(a="0/2")
    (agents.directory / "go").touch()
    assert agents.ended("a") == 0, agents.story()


def test_who_finishes_early_waits_for_the_others(agents: Agents) -> None:
    agents.start("a")
    agents.wait_for(a="0/1")
    agents.start("b")
    agents.wait_for(a="0/2", b="1/2")
    os.kill(int(agents.up("b.0")[2]), signal.SIGSTOP)
    (agents.directory / "go").touch()
    with pytest.raises(subprocess.TimeoutExpired):
        agents._processes["a"].wait(1)
    os.kill(int(agents.up("b.0")[2]), signal.SIGCONT)
    assert [agents.ended("a"), agents.ended("b")] == [0, 0], agents.story()


def test_a_failure_calls_all_back_until_restarts_are_used_up(agents: Agents) -> None:
    agents.start("a", "--max-restarts", "1")
    agents.wait_for(a="0/1")
    agents.start("b", "--max-restarts", "1")
    agents.wait_for(a="0/2", b="1/2")
    before = int(agents.up("a.0")[0])
    os.kill(int(agents.up("b.0")[2]), signal.SIGKILL)
    until(lambda: [int(agents.up(f"{name}.0")[0]) for name in "ab"] == [before + 1] * 2)
    agents.wait_for(a="0/2", b="1/2")
    os.kill(int(agents.up("b.0")[2]), signal.SIGKILL)
    assert agents.ended("b") == 1, agents.story()
    assert agents.ended("a") != 0, agents.story()
    assert "all 1 restarts are used up" in agents.said("b")
    assert "another node gave up" in agents.said("a")


def test_a_signal_stops_the_job(agents: Agents) -> None:
    agents.start("a")
    agents.wait_for(a="0/1")
    agents.send("a", signal.SIGTERM)
    assert agents.ended("a") != 0


@pytest.mark.everyday
def test_an_unknown_name_is_answered_with_the_known_ones(launch: Launch) -> None:
    status = launch.run("--rdzv-backend", "nobody", "--nnodes", "2", launch.script(""))
    assert status == 2
    assert "must be one of static, c10d, etcd, etcd-v2" in launch.err
