"""FileStore: killed writers leave nothing that counts; a crashed run's file is not used again."""

from __future__ import annotations

import random
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from tests.system.everyday import wait_until

from rallypoint.store.file import FileStore

pytestmark = pytest.mark.system

PROCESSES = 4
KILLED = {1, 2}

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


@pytest.mark.everyday
def test_killed_writers_never_leave_a_torn_value(tmp_path: Path, seed: int) -> None:
    path = str(tmp_path / "store")
    observer = FileStore(path, run_id="run")
    chance = random.Random(seed)
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(i)], stderr=subprocess.PIPE)
        for i in range(PROCESSES)
    ]

    def wait_for_more(writes: int) -> None:
        goal = observer.add("sum", 0) + writes
        wait_until(lambda: observer.add("sum", 0) >= goal)

    try:
        observer.wait([f"value/{i}" for i in range(PROCESSES)], timedelta(seconds=60))
        for i in sorted(KILLED):
            wait_for_more(chance.randrange(1, 30))
            processes[i].kill()
        wait_for_more(50)  # by the living
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


@pytest.mark.everyday
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
