"""Launches real jobs, and knows when nothing of them is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests import parts
from tests.hosts import why_not
from tests.system import everyday

# In the environment of everything a test starts, so that only its own processes are looked for.
MARK = "RALLYPOINT_TEST_MARK"
OURS = ("-m", "rallypoint", "run")


class LeftBehindError(AssertionError):
    """Processes outlive the job that started them; see tests/rerun.py."""


class Launch:
    """One launch of `rallypoint run` in the background, with its output in files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self._out = directory / "stdout.txt"
        self._err = directory / "stderr.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def script(self, text: str, name: str = "worker.py") -> str:
        path = self.directory / name
        path.write_text(text)
        return str(path)

    def start(
        self,
        *words: str,
        environ: dict[str, str] | None = None,
        launcher: tuple[str, ...] = OURS,
        before: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start a launcher; `before`: what to put before its command."""
        # Without it, the launcher may have a word to say; "" in `environ` means not there.
        given = {
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "TMPDIR": str(self.directory)},
            **(environ or {}),
        }
        if not given["OMP_NUM_THREADS"]:
            del given["OMP_NUM_THREADS"]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*before, sys.executable, *launcher, *everyday.patient(words)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=self.directory,
                env={**given, MARK: self.mark},
            )
        return self.process

    def run(
        self,
        *words: str,
        environ: dict[str, str] | None = None,
        launcher: tuple[str, ...] = OURS,
    ) -> int:
        return self.start(*words, environ=environ, launcher=launcher).wait(200)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for(self, name: str, count: int = 1) -> list[Path]:
        """Until `count` files in the directory match `name`."""
        assert self.process is not None
        deadline = time.monotonic() + 60
        while True:
            has_ended = self.process.poll() is not None
            found = list(self.directory.glob(name))
            if len(found) >= count:
                return found
            assert not has_ended, f"launcher ended early: {self.err}"
            assert time.monotonic() < deadline, f"no {count} {name} after 60 s; stderr: {self.err}"
            time.sleep(0.01)

    def wait_for_file(self, name: str) -> None:
        """Until that file is there, launch or not."""
        deadline = time.monotonic() + 60
        while not (self.directory / name).exists():
            assert time.monotonic() < deadline, f"no {name} after 60 s"
            time.sleep(0.01)

    def guardian_pid(self) -> int:
        assert self.process is not None
        (pid,) = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and parent_of(entry) == self.process.pid
        ]
        return pid

    def left_over(self, *, within_s: float = 0.0) -> list[str]:
        """What of this launch still runs, now or at the latest after `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            found = self.running()
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def expect_nothing_left(self) -> None:
        """Raise LeftBehindError if something of this launch still runs after a minute."""
        if found := self.left_over(within_s=everyday.LEAST_BOUND_S):
            raise LeftBehindError("; ".join(found))

    def running(self) -> list[str]:
        """What of this launch runs: by the mark in its environment, or by being the guardian."""
        return [text for text in map(self._describe, Path("/proc").iterdir()) if text]

    def left_files(self) -> list[str]:
        return [path.name for path in self.directory.glob("rallypoint_*")]

    def _describe(self, entry: Path) -> str:
        if not entry.name.isdigit():
            return ""
        try:
            # The guardian has no environment, but the directory of its launch as its own.
            is_ours = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes() or (
                (entry / "comm").read_text() == "rally-guardian\n"
                and (entry / "cwd").readlink() == self.directory
            )
            return f"{entry.name}: {(entry / 'cmdline').read_text()}" if is_ours else ""
        except OSError:
            return ""


def parent_of(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture(scope="session", autouse=True)
def _own_jobs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither running jobs nor what failed ones leave are seen by others, or among the user's."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["RALLYPOINT_RUN_DIR"] = str(tmp_path_factory.mktemp("jobs"))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a launch inherits it, if this runs under nohup
    launch = Launch(tmp_path)
    yield launch
    if launch.process is not None and launch.process.poll() is None:
        launch.process.send_signal(signal.SIGKILL)
        launch.process.wait()
    launch.expect_nothing_left()


@pytest.fixture(autouse=True)
def _is_everyday(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    is_marked = request.node.get_closest_marker("everyday") is not None
    monkeypatch.setattr(everyday, "is_on", is_marked)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """In `make test-all`, jobs import PyTorch once each, in half the time."""
    if item.config.getoption("--part") == parts.REST:
        if item.get_closest_marker("needs_torch") is not None:
            os.environ["PET_PRELOAD"] = "torch"
        else:
            os.environ.pop("PET_PRELOAD", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse an everyday test that a busy machine could fail."""
    found: dict[str, list[str]] = {}
    for item in items:
        mark = item.get_closest_marker("everyday")
        if mark is not None and isinstance(item, pytest.Function):
            name = item.nodeid.partition("[")[0]
            if name not in found:
                found[name] = everyday.faults(item.function, **mark.kwargs)
    told = [f"{name}: {fault}" for name, faults in found.items() for fault in faults]
    if told:
        raise pytest.UsageError("\n".join(["not fit for every day:", *told]))


@pytest.fixture(scope="session")
def needs_hosts() -> None:
    """For tests on hosts of their own."""
    reason = why_not()
    if reason:
        pytest.skip(f"no test hosts: {reason}")


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
