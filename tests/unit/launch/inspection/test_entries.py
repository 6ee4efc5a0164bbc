"""Agents' entries: found while they live, removed when they were killed, closed to other users."""

from __future__ import annotations

import errno
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
from rallypoint.launch.inspection.entries import (
    Entry,
    describe_agent,
    running_agents,
    shown_command,
    shown_name,
)
from rallypoint.launch.job import Job, Nodes, Rendezvous
from rallypoint.rendezvous.job.round import Endpoint

JOB = Job(command=("python", "a b.py"), local_world_size=1, run_id="try", host="h", environ={})
ABOUT = describe_agent(JOB, logs="")
OTHER = {"run_id": "other", "began": "1.5"}
AGENT = """
import json, os, signal, sys
from rallypoint.launch.inspection.entries import Entry
os.environ["RALLYPOINT_RUN_DIR"] = sys.argv[1]
entry = Entry(json.loads(sys.argv[2]))
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Entries are in a directory of the test's own."""
    path = tmp_path / "agents"
    monkeypatch.setenv("RALLYPOINT_RUN_DIR", str(path))
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


def test_an_entry_that_was_never_completed_is_removed(place: Path) -> None:
    with running_agent(place) as agent:
        old, young = place / "1234-1.new", place / "1235-1.new"
        for path in (old, young):
            path.touch()
        os.utime(old, (0, 0))
        assert [each.pid for each in running_agents()] == [agent.pid]
        assert not old.exists()
        assert young.exists()  # its agent may be about to complete it


def test_an_entry_that_cannot_be_written_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", is_full)
    with pytest.raises(OSError, match="No space left"):
        Entry(ABOUT)
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


def test_a_description_says_where_the_nodes_of_a_job_meet() -> None:
    at = Endpoint(host="a", port=1)
    dynamic = JOB.__replace__(
        rendezvous=Rendezvous(
            backend="c10d", endpoints=(at, at), run_id="try", min_nodes=2, max_nodes=4
        )
    )
    static = JOB.__replace__(
        nodes=Nodes(count=2, node_rank=1, master_addr="b", master_port=2, token=b"x")
    )
    found = [describe_agent(job, logs="/logs") for job in (JOB, dynamic, static)]
    assert [(each["meets_at"], each["nnodes"], each["logs"]) for each in found] == [
        ("", "1", "/logs"),
        ("a:1,a:1", "2:4", "/logs"),
        ("b:2", "2", "/logs"),
    ]


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


def test_a_long_path_is_no_hindrance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a socket may have 107 characters."""
    place = tmp_path / ("x" * 120)
    monkeypatch.setenv("RALLYPOINT_RUN_DIR", str(place))
    with running_agent(place) as agent, socket.socket(socket.AF_UNIX) as asking:
        (found,) = running_agents()
        found.connect(asking)
        assert found.pid == agent.pid


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root reads other users' directories")
NOBODY = 65534


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of entries that belongs to another user."""
    with tempfile.TemporaryDirectory(prefix="rallypoint-test-") as parent:
        Path(parent).chmod(0o755)
        place = Path(parent, "agents")
        place.mkdir(mode=0o700)
        os.chown(place, NOBODY, NOBODY)
        monkeypatch.setattr(entries, "_directories", lambda: [str(place)])
        yield place


def entry_name() -> str:
    """Of an agent that is this process."""
    return f"{os.getpid()}{entries._namespace()}"


def put(path: Path, text: str, *, owner: int = NOBODY) -> Path:
    path.write_text(text)
    os.chown(path, owner, owner)
    return path


def listed_within_a_minute() -> list[entries.Found]:
    """What root finds; in a child, as it might wait for ever."""
    child = "from rallypoint.launch.inspection import entries\n"
    child += f"entries._directories = lambda: {entries._directories()!r}\n"
    child += "print(len(entries.running_agents()))"
    found = subprocess.run(
        [sys.executable, "-c", child], check=True, capture_output=True, text=True, timeout=60
    )
    assert int(found.stdout) == len(running_agents())
    return running_agents()


@as_root
def test_what_a_killed_agent_of_another_user_leaves_is_removed(theirs: Path) -> None:
    put(theirs / f"{entry_name()}.job", "began=1")
    put(theirs / f"{entry_name()}.sock", "")
    assert listed_within_a_minute() == []
    assert list(theirs.iterdir()) == []


@as_root
def test_a_link_in_place_of_another_users_directory_is_not_followed(
    theirs: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    kept = [put(victim / f"{entry_name()}{end}", "x", owner=0) for end in (".job", ".sock")]
    theirs.rmdir()
    theirs.symlink_to(victim)
    assert listed_within_a_minute() == []
    assert all(path.exists() for path in kept)


@as_root
@pytest.mark.parametrize("kind", ["a link", "a hard link", "a pipe", "a directory", "a socket"])
def test_only_regular_files_of_its_owner_count_in_it(
    theirs: Path, tmp_path: Path, kind: str
) -> None:
    path = theirs / f"{entry_name()}.job"
    victim = put(theirs.parent / "victim.job", "began=1", owner=0)
    if kind == "a link":
        path.symlink_to(victim)
    elif kind == "a hard link":
        path.hardlink_to(victim)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    assert listed_within_a_minute() == []
    assert path.is_symlink() or path.exists()
    assert victim.read_text() == "began=1"


LOCKED = """
import os, socket, sys, time
os.setgid(65534); os.setuid(65534)
name, about = sys.argv[1:]
with open(f"{name}.job", "w+b", buffering=0) as file:
    os.lockf(file.fileno(), os.F_LOCK, 0)
    file.write(about.encode())
    print("ready", flush=True)
    time.sleep(600)
"""


@contextmanager
def locked_entry(place: Path, about: str) -> Iterator[str]:
    """An entry that another user's process keeps, and that names this one."""
    path = str(place / entry_name())
    command = [sys.executable, "-c", LOCKED, path, about]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        try:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "ready\n"
            yield path
        finally:
            agent.kill()


@as_root
@pytest.mark.parametrize("about", ["", "began=soon", "began=\0", "\0\0=", "run_id=x"])
def test_what_no_agent_has_written_is_left_alone(theirs: Path, about: str) -> None:
    with locked_entry(theirs, about.replace("\0", "\x1f")):
        assert listed_within_a_minute() == []


@as_root
def test_nobody_else_is_asked_in_its_place(theirs: Path) -> None:
    """Its socket is a link to that of another process, or of root's."""
    with (
        locked_entry(theirs, "began=1") as path,
        socket.socket(socket.AF_UNIX) as roots,
        socket.socket(socket.AF_UNIX) as asking,
    ):
        roots.bind(str(theirs.parent / "roots.sock"))
        roots.listen()
        Path(f"{path}.sock").symlink_to(theirs.parent / "roots.sock")
        (found,) = running_agents()
        assert found.user == NOBODY
        with pytest.raises(ConnectionRefusedError):
            found.connect(asking)


def test_a_directory_that_is_open_to_others_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("RALLYPOINT_RUN_DIR", str(tmp_path))
    job = JOB.__replace__(environ={"RALLYPOINT_RUN_DIR": str(tmp_path)})
    assert entries.make_entry(job, "") is None
    told = " ".join(capsys.readouterr().err.split())
    assert f"cannot use RALLYPOINT_RUN_DIR={tmp_path} (" in told
    assert "will not find this job, and hangs are not reported." in told


@as_root
def test_other_users_are_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rallypoint-test-") as parent:
        place = f"{parent}/agents"
        monkeypatch.setenv("RALLYPOINT_RUN_DIR", place)
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


UUID = "1f0e2a43-0b1c-4d5e-8f90-a1b2c3d4e5f6"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python -u train.py --x", "train-1f0e"),
        ("python -u /home/me/train.py", "train-1f0e"),
        ("python -u -m my.train -x", "train-1f0e"),
        ("python -u -c text some/train.py", "train-1f0e"),
        ("./train.sh x", "train.sh-1f0e"),
        ("python -u package/", "package-1f0e"),
        ("python -u -", "job-1f0e"),
        ("python -u .", "job-1f0e"),
        ("python -u", "job-1f0e"),
        ("", "job-1f0e"),
    ],
)
def test_a_job_without_a_name_is_called_by_its_script(command: str, name: str) -> None:
    assert shown_name(UUID, tuple(command.split())) == name


@pytest.mark.parametrize("run_id", ["try", "none", "", UUID[:-1], UUID.replace("f", "g"), "a-b"])
def test_a_job_with_a_name_is_called_by_it(run_id: str) -> None:
    assert shown_name(run_id, ("python", "-u", "train.py")) == run_id


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python -u train.py --x", "train.py --x"),
        ("python -u /here/train.py --data /here/data", "train.py --data data"),
        ("./train.sh --x", "./train.sh --x"),
        (
            "python -u train.py --sleep " + "word " * 9 + "words",
            "train.py --sleep" + " word" * 8 + " ...",
        ),
        ("python -u " + "x" * 70, "x" * 56 + " ..."),
    ],
)
def test_a_command_in_a_table_ends_with_a_word(command: str, shown: str) -> None:
    assert shown_command(tuple(command.split()), "/here") == shown
    assert len(shown) <= 60
