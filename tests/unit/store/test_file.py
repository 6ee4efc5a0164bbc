"""FileStore: what counts as a record, who may use the file, and when it is removed.

tests/system/test_file_store.py kills writers.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import pytest

from rallypoint.base.errors import StoreConnectionError, StoreError, StoreTimeoutError
from rallypoint.store.file import FileStore, encode_record
from rallypoint.store.local_store import Change, ChangeKind


@pytest.mark.parametrize("keep", range(0, 60, 7))
def test_a_torn_record_never_counts(tmp_path: Path, keep: int) -> None:
    """Whatever part of a record a killed writer left, readers stop before it, writers cut it."""
    path = tmp_path / "store"
    store = FileStore(str(path), run_id="run")
    store.set("whole", "value")
    record = encode_record([Change(ChangeKind.SET, b"torn", b"x" * 40)])
    with path.open("ab") as file:
        file.write(record[:keep])
    reader = store.clone()
    assert reader.list_keys() == ["whole"]
    reader.set("after", "1")
    assert sorted(store.list_keys()) == ["after", "whole"]
    assert store.get("after") == b"1"


def test_flipped_bits_and_zeros_at_the_end_are_no_record(tmp_path: Path) -> None:
    path = tmp_path / "store"
    store = FileStore(str(path), run_id="run")
    record = bytearray(encode_record([Change(ChangeKind.SET, b"k", b"value")]))
    record[-1] ^= 1
    for junk in (bytes(record), b"\0" * 100):
        with path.open("ab") as file:
            file.write(junk)
        assert store.clone().list_keys() == []


def test_the_last_member_out_removes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "store"
    first, second = FileStore(str(path), 2), FileStore(str(path), 2)
    first.set("k", "v")
    first.close()
    assert second.get("k") == b"v"
    second.close()
    assert not path.exists()
    with FileStore(str(path), 1) as fresh:
        assert fresh.num_keys() == 0


def test_another_runs_file_is_refused_or_reset(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    FileStore(path, run_id="monday").set("k", "old")
    with pytest.raises(StoreError, match="run 'monday' left it and this is run 'tuesday'"):
        FileStore(path, run_id="tuesday")
    with FileStore(path, run_id="tuesday", reset_stale=True) as store:
        assert store.num_keys() == 0


def test_members_of_a_run_whose_file_was_reset_leave_the_new_runs_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    old = FileStore(path, 2, run_id="monday")
    old.set("k", "old" * 100)
    with FileStore(path, 2, run_id="tuesday", reset_stale=True) as new:
        new.set("k", "new")
        for call in (lambda: old.get("k"), lambda: old.set("k", "old")):
            with pytest.raises(StoreError, match="another run has taken over the file"):
                call()
        old.close()
        assert new.get("k") == b"new"
        assert new.clone().list_keys() == ["k"]


def test_more_members_than_the_world_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    first = FileStore(path, 1)
    with pytest.raises(StoreError, match="1 processes have already joined"):
        FileStore(path, 1)
    first.close()


def test_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("three years of work")
    with pytest.raises(StoreError, match="it is not a store"):
        FileStore(str(path))
    assert path.read_text() == "three years of work"


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    for name, why in (("pipe", "not a regular file"), ("directory", "Is a directory")):
        with pytest.raises(StoreConnectionError, match=f"{name} failed: {why}; check the path"):
            FileStore(str(tmp_path / name))


def test_a_wait_ends_with_its_timeout(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), timeout=timedelta(seconds=0.1))
    with pytest.raises(StoreTimeoutError, match="get of 'k'"):
        store.get("k")
    assert Path(store.path).exists()


def test_a_call_in_a_signal_handler_in_the_middle_of_another_is_refused(tmp_path: Path) -> None:
    """Both would need the lock of the file; in a wait for a key, it is made."""
    store = FileStore(str(tmp_path / "store"))
    told = list[str]()

    def handle(*_: object) -> None:
        try:
            store.set("key", "value")
        except StoreError as error:
            told.append(str(error))
        else:
            told.append("made")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with store._hold("check", "key", writes=False) as contents:
            signal.raise_signal(signal.SIGUSR1)
            assert not contents.has("key")
        signal.raise_signal(signal.SIGUSR1)
        assert store.check(["key"])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "a signal handler has interrupted another call of this store" in told[0]
    assert told[1:] == ["made"]
