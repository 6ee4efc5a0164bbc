"""The job's directory: its layout, where it cannot be, and processes that carry its name."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rallypoint.base.errors import HostError
from rallypoint.launch.output.streams import JobDirectory


def test_each_process_has_files_of_its_own(tmp_path: Path) -> None:
    directory = JobDirectory("my job/7", {"TMPDIR": str(tmp_path)})
    assert Path(directory.path).parent == tmp_path
    assert Path(directory.path).name.startswith("rallypoint_my_job_7_")
    assert directory.to_remove == directory.path
    directory.start_round(3)
    assert directory.directory_of(0) == f"{directory.path}/attempt_3/0"
    assert directory.make_directory(0) == f"{directory.path}/attempt_3/0"
    assert directory.make_directory(0) == f"{directory.path}/attempt_3/0.2"  # took its place
    assert directory.directory_of(0) == f"{directory.path}/attempt_3/0.2"
    found = {str(path.relative_to(directory.path)) for path in tmp_path.rglob("attempt_3/*")}
    assert found == {"attempt_3/0", "attempt_3/0.2"}


def test_logs_stay(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "logs"
    directory = JobDirectory("job", {}, log_directory=str(place), is_kept=True)
    latest = place / "latest"
    assert {str(path) for path in place.iterdir()} == {directory.path, str(latest)}
    assert directory.to_remove == ""
    assert latest.resolve() == Path(directory.path)
    assert not latest.readlink().is_absolute()  # the whole directory may be moved
    newer = JobDirectory("job", {}, log_directory=str(place), is_kept=True)
    assert latest.resolve() == Path(newer.path)
    assert len(list(place.iterdir())) == 3


def test_a_latest_of_the_users_stays(tmp_path: Path) -> None:
    for make in (Path.touch, Path.mkdir):
        place = tmp_path / make.__name__
        place.mkdir()
        make(place / "latest")
        JobDirectory("job", {}, log_directory=str(place), is_kept=True)
        assert not (place / "latest").is_symlink()


@pytest.mark.parametrize("call", ["symlink", "replace"])
def test_a_file_system_without_links(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, refuse)
    directory = JobDirectory("job", {}, log_directory=str(tmp_path), is_kept=True)
    assert [str(path) for path in tmp_path.iterdir()] == [directory.path]


def test_jobs_at_the_same_time_leave_one_link(tmp_path: Path) -> None:
    def start(_: int) -> str:
        return JobDirectory("job", {}, log_directory=str(tmp_path), is_kept=True).path

    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(start, range(100)))
    assert str((tmp_path / "latest").resolve()) in paths
    assert len(list(tmp_path.iterdir())) == 101


def test_a_place_that_is_a_file(tmp_path: Path) -> None:
    """Logs need one; error files are only a convenience."""
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(HostError, match=rf"logs in {file}: (Not a dir|File exists).*--log-dir\.$"):
        JobDirectory("job", {}, log_directory=str(file), is_kept=True)
    directory = JobDirectory("job", {"TMPDIR": str(file)})
    assert (directory.path, directory.to_remove) == ("", "")
    directory.start_round(0)
    assert directory.make_directory(0) == ""
    assert not directory.make_attempt()
    assert directory.kill_marked() == []


def test_a_directory_that_was_removed_meanwhile(tmp_path: Path) -> None:
    directory = JobDirectory("job", {"TMPDIR": str(tmp_path)})
    directory.start_round(0)
    Path(directory.path).rmdir()
    assert directory.make_directory(0) == ""
    Path(directory.path).mkdir()
    Path(directory.attempt).touch()  # in the way of the round's files
    assert directory.make_directory(0) == ""


def test_processes_that_carry_its_name_are_killed_and_no_others(tmp_path: Path) -> None:
    directory = JobDirectory("job", {"TMPDIR": str(tmp_path)})
    program = [sys.executable, "-I", "-S", "-c", "import sys; print(flush=True); sys.stdin.read()"]
    started = []
    for path in (directory.path, f"{directory.path}x"):
        environ = {"TORCHELASTIC_ERROR_FILE": f"{path}/attempt_0/0/error.json"}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(program, stdin=pipe, stdout=pipe, env=environ))
    with started[0] as ours, started[1] as other:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
        assert directory.kill_marked() == [ours.pid]
        assert ours.wait() == -9
        assert other.poll() is None
