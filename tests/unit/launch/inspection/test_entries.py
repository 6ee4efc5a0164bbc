"""Agents' entries: found while they live, removed when they were killed, closed to other users."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from rallypoint.launch.inspection import entries
from rallypoint.launch.inspection.entries import Entry, describe_agent, running_agents

ABOUT = describe_agent(
    run_id="try", meets_at="", command=("python", "a b.py"), logs="", began=1.5, nnodes="1"
)
OTHER = {"run_id": "other"}
AGENT = """
import json, signal, sys
from rallypoint.launch.inspection import entries
entries._own_places = lambda: ("/nowhere", sys.argv[1])
entry = entries.Entry(json.loads(sys.argv[2]))
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Entries are in a directory of the test's own."""
    path = tmp_path / "agents"
    monkeypatch.setattr(entries, "_own_places", lambda: (str(tmp_path / "none"), str(path)))
    monkeypatch.setattr(entries, "_directories", lambda: [str(path)])
    return path


@contextmanager
def running_agent(place: Path, about: Mapping[str, str] = OTHER) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", AGENT, str(place), json.dumps(about)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "ready\n"
            yield agent
        finally:
            agent.kill()


def test_an_agent_is_found(place: Path) -> None:
    with running_agent(place) as agent:
        (found,) = running_agents()
        assert (found.pid, found.run_id) == (agent.pid, "other")


def test_what_a_killed_agent_leaves_is_removed(place: Path) -> None:
    with running_agent(place) as agent:
        agent.send_signal(signal.SIGKILL)
    assert sorted(path.suffix for path in place.iterdir()) == [".job", ".sock"]
    assert running_agents() == []
    assert list(place.iterdir()) == []


def test_a_stopped_agent_is_still_found(place: Path) -> None:
    with running_agent(place) as agent:
        agent.send_signal(signal.SIGSTOP)
        assert [each.pid for each in running_agents()] == [agent.pid]


def test_nothing_is_left_after_a_close(place: Path) -> None:
    Entry(ABOUT).close()
    assert list(place.iterdir()) == []


def test_a_description_comes_back_as_it_was(place: Path) -> None:
    with running_agent(place, ABOUT):
        (found,) = running_agents()
        assert dict(found.about) == ABOUT
        assert found.command == ("python", "a b.py")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_a_directory_that_others_may_enter_is_not_used(place: Path, mode: int) -> None:
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(PermissionError):
        Entry(ABOUT)
    assert list(place.iterdir()) == []


def test_a_link_in_place_of_the_directory_is_not_followed(place: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    place.symlink_to(target)
    with pytest.raises(OSError, match="is accessible to other users"):
        Entry(ABOUT)
    assert list(target.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_other_users_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rallypoint-test-") as parent:
        place = f"{parent}/agents"
        monkeypatch.setattr(entries, "_own_places", lambda: ("/nowhere", place))
        monkeypatch.setattr(entries, "_directories", lambda: [place])
        entry = Entry(ABOUT)
        (path,) = map(str, Path(place).glob("*.sock"))
        try:
            for each in (parent, place, path):  # as if they did not protect it
                Path(each).chmod(0o777)
            assert connects_as(65534, path)
            assert entry.accept() is None
            assert connects_as(0, path)
            mine = entry.accept()
            assert mine is not None
            mine.close()
        finally:
            entry.close()


def connects_as(user: int, path: str) -> bool:
    child = os.fork()
    if child == 0:
        os.setuid(user)
        try:
            socket.socket(socket.AF_UNIX).connect(path)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
