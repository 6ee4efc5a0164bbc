"""File system calls in a thread: in order, with their errors, and never waited for without end."""

from __future__ import annotations

import errno
import os
import selectors
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from rallypoint.launch.output import file_work
from rallypoint.launch.output.file_work import FileWork

PATIENT_S = 60.0


def set_patience(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    """For how long a call waits for its job."""
    monkeypatch.setattr(FileWork._wait, "__defaults__", (patience_s,))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    set_patience(monkeypatch, PATIENT_S)


@pytest.fixture
def files() -> Iterator[FileWork]:
    with selectors.DefaultSelector() as selector:
        files = FileWork(selector)
        yield files
        files.close()


def refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def await_its_end(files: FileWork) -> None:
    """That of the thread."""
    while files._has_thread:
        time.sleep(0.001)


def test_without_a_thread_jobs_are_done_at_once(
    files: FileWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(file_work, "start_new_thread", refuse_thread)
    told: list[object] = []
    for number in range(3):
        files.do(partial(int, number), told.append)
    with pytest.raises(OSError, match="No space"):
        files.call(refuse)
    assert files.flush(PATIENT_S)
    assert told == [0, 1, 2]


def test_jobs_are_done_in_order_and_told_in_the_loop(files: FileWork) -> None:
    told: list[object] = []
    me = threading.get_ident()
    for number in range(100):
        files.do(partial(lambda n: (n, threading.get_ident() != me), number), told.append)
    assert not told
    assert files.flush(PATIENT_S)
    assert told == [(number, True) for number in range(100)]


def test_errors_come_back(files: FileWork) -> None:
    told: list[object] = []
    files.do(refuse, told.append)
    assert files.flush(PATIENT_S)
    assert [type(each) for each in told] == [OSError]
    with pytest.raises(OSError, match="No space left"):
        files.call(refuse)
    assert files.call(lambda: 3) == 3


def test_what_hangs_is_waited_for_once(files: FileWork, monkeypatch: pytest.MonkeyPatch) -> None:
    set_patience(monkeypatch, 0.1)
    goes_on = threading.Event()
    with pytest.raises(OSError, match="does not answer"):
        files.call(goes_on.wait)
    with monkeypatch.context() as context:
        context.delattr(FileWork, "_wait")
        for _ in range(100):
            with pytest.raises(OSError, match="does not answer"):
                files.call(lambda: 3)
    assert not files.flush(0.1)
    goes_on.set()
    assert files.flush(PATIENT_S)
    set_patience(monkeypatch, PATIENT_S)
    assert files.call(lambda: 3) == 3


def test_the_thread_ends_and_comes_back(files: FileWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileWork._run, "__defaults__", (0.0,))
    for number in range(500):
        assert files.call(lambda: 3) == 3
        if number % 5 == 0:  # else it may be about to end
            await_its_end(files)


def test_who_is_closed_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileWork._run, "__defaults__", (0.0,))
    with selectors.DefaultSelector() as selector:
        files = FileWork(selector)
        told: list[object] = []
        goes_on = threading.Event()
        files.do(goes_on.wait, told.append)
        files.close()
        goes_on.set()
        await_its_end(files)
        assert not selector.get_map()
    assert not told
