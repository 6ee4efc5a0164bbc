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
from tests.conftest import SOON_S

from rallypoint.launch.output import file_work
from rallypoint.launch.output.file_work import FileWork


@pytest.fixture
def files() -> Iterator[FileWork]:
    with selectors.DefaultSelector() as selector:
        files = FileWork(selector)
        yield files
        files.close()


def refuse() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
    assert files.flush(SOON_S)
    assert told == [0, 1, 2]


def test_jobs_are_done_in_order_and_told_in_the_loop(files: FileWork) -> None:
    told: list[object] = []
    me = threading.get_ident()
    for number in range(100):
        files.do(partial(lambda n: (n, threading.get_ident() != me), number), told.append)
    assert not told
    assert files.flush(SOON_S)
    assert told == [(number, True) for number in range(100)]


def test_errors_come_back(files: FileWork) -> None:
    told: list[object] = []
    files.do(refuse, told.append)
    assert files.flush(SOON_S)
    assert [type(each) for each in told] == [OSError]
    with pytest.raises(OSError, match="No space left"):
        files.call(refuse)
    assert files.call(lambda: 3) == 3


def test_what_hangs_is_waited_for_once(files: FileWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_work, "_PATIENCE_S", 0.2)
    goes_on = threading.Event()
    with pytest.raises(OSError, match="does not answer"):
        files.call(goes_on.wait)
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(OSError, match="does not answer"):
            files.call(lambda: 3)
    assert time.monotonic() - began < SOON_S
    assert not files.flush(0.1)
    goes_on.set()
    assert files.flush(SOON_S)
    assert files.call(lambda: 3) == 3


def test_the_thread_ends_and_comes_back(files: FileWork, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_work, "_LINGERS_S", 0.01)
    for _ in range(50):
        assert files.call(lambda: 3) == 3
        time.sleep(0.015)


def test_who_is_closed_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with selectors.DefaultSelector() as selector:
        files = FileWork(selector)
        told: list[object] = []
        goes_on = threading.Event()
        files.do(goes_on.wait, told.append)
        files.close()
        goes_on.set()
        time.sleep(0.05)
        assert not selector.get_map()
    assert not told
