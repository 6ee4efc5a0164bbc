"""FileStore: killed writers leave nothing that counts; a crashed run's file is not used again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from rallypoint.base.errors import StoreConnectionError, StoreError, StoreTimeoutError
from rallypoint.store.file import FileStore
from rallypoint.store.file_log import Change, Kind, encode_record

PROCESSES = 8
KILLED = {2, 5, 7}
ROUNDS = 6

# Each value says how long it is and repeats one letter, so that a torn one cannot pass.
WRITER = """
import sys
from rallypoint.store.file import FileStore
path, name = sys.argv[1:]
store = FileStore(path, run_id="run")
count = 0
while not store.check(["stop"]):
    count += 1
    letter = chr(97 + count % 26)
    size = (count * 7919) % 20000
    store.set("value/" + name, f"{size}:" + letter * size)
    store.add("sum", 1)
    for key in store.list_keys():
        if key.startswith("value/"):
            size, _, letters = store.get(key).decode().partition(":")
            assert len(letters) == int(size) and len(set(letters)) <= 1, (key, size, letters[:50])
store.close()
"""


def test_killed_writers_never_leave_a_torn_value(tmp_path: Path, seed: int) -> None:
    path = str(tmp_path / "store")
    observer = FileStore(path, run_id="run")
    chance = random.Random(seed)
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(i)], stderr=subprocess.PIPE)
        for i in range(PROCESSES)
    ]
    try:
        observer.wait([f"value/{i}" for i in range(PROCESSES)], timedelta(seconds=60))
        for i in sorted(KILLED):
            time.sleep(chance.uniform(0.01, 0.3))
            processes[i].kill()
        before = observer.add("sum", 0)
        while observer.add("sum", 0) < before + 50:  # the living go on
            time.sleep(0.01)
        observer.set("stop", "")
        for i, process in enumerate(processes):
            _, errors = process.communicate(timeout=60)
            assert process.returncode == (-9 if i in KILLED else 0), errors.decode()
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stderr:
                process.stderr.close()
    for i in range(PROCESSES):
        size, _, letters = observer.get(f"value/{i}").decode().partition(":")
        assert len(letters) == int(size)
    observer.close()


@pytest.mark.parametrize("keep", range(0, 60, 7))
def test_a_torn_record_never_counts(tmp_path: Path, keep: int) -> None:
    """Whatever part of a record a killed writer left, readers stop before it, writers cut it."""
    path = tmp_path / "store"
    store = FileStore(str(path), run_id="run")
    store.set("whole", "value")
    record = encode_record([Change(Kind.SET, b"torn", b"x" * 40)])
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
    record = bytearray(encode_record([Change(Kind.SET, b"k", b"value")]))
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


def test_a_crashed_runs_file_is_emptied_though_it_has_no_id(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    script = (
        "import os; from rallypoint.store.file import FileStore\n"
        f"FileStore({path!r}).set('k', 'old'); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == -9
    with pytest.warns(RuntimeWarning, match="crashed"):
        store = FileStore(path)
    assert not store.check(["k"])


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
    assert os.path.exists(store.path)  # noqa: PTH110
