"""What is added to the messages of errors that do not say what the matter was."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from rallypoint.base.fatal_error import completed

WRITER = (
    "[enforce fail at x.cc:1] . PytorchStreamWriter failed writing file data/0: file write failed"
)


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is said to be a full file system of its own."""
    real, place = os.statvfs, tmp_path / "full"
    place.mkdir()

    def statvfs(path: str | Path) -> object:
        if Path(path).is_relative_to(place):
            return SimpleNamespace(f_blocks=10, f_bavail=1, f_frsize=4096)
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(Path, "is_mount", lambda path: path in (place, Path("/")))
    return place


def told(error: BaseException, **values: object) -> str:
    """Of an error that a function with such local variables raised."""

    def fail(path: object) -> None:
        assert path is not values  # it is what the frame holds that counts
        raise error

    try:
        fail(values.get("path"))
    except BaseException as caught:
        return completed(str(caught), caught, caught.__traceback__)
    raise AssertionError


def test_what_has_another_reason_is_left_as_it_is(full: Path) -> None:
    assert told(ValueError("no"), path=str(full / "a")) == "no"
    assert (
        told(OSError(errno.EIO, "Input/output error"), path=full) == "[Errno 5] Input/output error"
    )


def test_a_full_file_system_is_named(full: Path) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = f"[Errno 28] No space left on device: {full} is full"
    assert told(error, path=full / "not" / "there.pt") == said
    assert told(error, path=str(full / "there.pt")) == said
    named = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(full / "x"))
    assert told(named).startswith(f"[Errno 28] No space left on device: {full} is full: '")


@pytest.mark.parametrize(
    "message", [WRITER, "unexpected pos 576 vs 470", "1048576 requested and 131072 written"]
)
def test_errors_that_do_not_say_why(full: Path, message: str) -> None:
    told_of = told(RuntimeError(message), path=full / "x")
    assert told_of == f"{message} (No space left on device: {full} is full)"


def test_nothing_is_made_up(tmp_path: Path) -> None:
    assert told(RuntimeError(WRITER), path=tmp_path / "x") == WRITER
    assert told(RuntimeError(WRITER), path="x" * 5000) == WRITER
    assert told(RuntimeError(WRITER), path="nul\0") == WRITER


def test_how_a_data_loaders_process_was_killed() -> None:
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    error = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
    assert told(error) == str(error)
    error.__cause__ = killed
    assert told(error) == str(killed)


def test_not_all_paths_of_a_large_frame_are_looked_at(
    full: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr("rallypoint.base.fatal_error._MOST_PATHS", 0)
    assert str(full) not in told(error, path=str(full / "a"))
