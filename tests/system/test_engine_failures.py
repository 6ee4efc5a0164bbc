"""Real processes that die, stop, or wait for each other, in the middle of messages."""

from __future__ import annotations

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system


@pytest.mark.parametrize("count", [10, pytest.param(300_000, marks=pytest.mark.everyday)])
def test_death_in_the_middle_of_messages(launch: Launch, count: int) -> None:
    """In the envelope, and while the receiver reads the sender's memory."""
    script = launch.script(
        "import os, threading, numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank, begun, number = dist.get_rank(), threading.Event(), 0\n"
        f"values = np.ones({count})\n"
        "def die():\n"
        "    begun.wait()\n"
        "    os._exit(0)\n"
        "if rank == 2: threading.Thread(target=die, daemon=True).start()\n"
        "try:\n"
        "    while True:\n"
        "        if rank == 0: dist.send(values, 1)\n"
        "        dist.recv(values, (rank - 1) % 3)\n"
        "        assert (values == 1).all()\n"
        "        if rank: dist.send(values, (rank + 1) % 3)\n"
        "        number += 1\n"
        "        if number == 30: begun.set()\n"
        "except dist.PeerLostError as error:\n"
        "    assert error.rank == 2, error\n"
        "    open(f'told.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("told.*"))) == 2


def test_a_fault_in_a_helper_thread_is_reported(launch: Launch) -> None:
    """The progress thread writes to memory that the program has taken away meanwhile."""
    script = launch.script(
        "import ctypes, faulthandler, mmap, time, numpy as np, rallypoint as dist\n"
        "faulthandler.enable()\n"
        "dist.init_process_group()\n"
        "if dist.get_rank() == 0:\n"
        "    array = np.frombuffer(mmap.mmap(-1, 1 << 16), np.uint8)\n"
        "    work = dist.irecv(array, 1)\n"
        "    at, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)\n"
        "    assert ctypes.CDLL(None).mprotect(at, size, 0) == 0\n"
        "dist.barrier()\n"
        "if dist.get_rank() == 1: dist.send(np.ones(1 << 16, np.uint8), 0)\n"
        "time.sleep(60)\n"
    )
    assert launch.run("--nproc-per-node", "2", script) != 0
    assert "Fatal Python error: Segmentation fault" in launch.err


@pytest.mark.everyday
def test_the_classic_deadlock_is_explained(launch: Launch) -> None:
    script = launch.script(
        "import numpy as np, rallypoint as dist\n"
        "from rallypoint.base.errors import DeadlockError\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "try:\n"
        "    dist.recv(np.ones(3), 1 - rank)\n"
        "except DeadlockError as error:\n"
        "    assert 'rank 0 is in recv from rank 1, tag 0' in str(error), error\n"
        "    open(f'told.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert len(list(launch.directory.glob("told.*"))) == 2


def test_a_thread_that_may_yet_send_is_no_deadlock(launch: Launch) -> None:
    script = launch.script(
        "import threading, time, numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank, got = dist.get_rank(), np.zeros(3)\n"
        "threading.Timer(1.0, dist.send, (np.ones(3), 1 - rank)).start()\n"
        "dist.recv(got, 1 - rank)\n"
        "assert (got == 1).all()\n"
        "open(f'done.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 2


@pytest.mark.exact
def test_a_sender_that_was_stopped_goes_on(launch: Launch) -> None:
    """Stopped for a second between and within messages; nothing is lost or spoilt."""
    script = launch.script(
        "import os, signal, subprocess, numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank, got = dist.get_rank(), np.zeros(500_000)\n"
        "if rank == 0:\n"
        "    me = os.getpid()\n"
        "    subprocess.Popen(['sh', '-c',\n"
        "        f'sleep 0.1; kill -STOP {me}; sleep 1; kill -CONT {me}'])\n"
        "for number in range(400):\n"
        "    if rank == 0: dist.send(np.full(500_000, float(number)), 1)\n"
        "    else:\n"
        "        dist.recv(got, 0)\n"
        "        assert (got == number).all()\n"
        "dist.barrier()\n"
        "open(f'done.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 2


STOPPED = """
import os, random, signal, subprocess, sys, time
import numpy as np, rallypoint as dist
from datetime import timedelta
from rallypoint.base.errors import CollectiveTimeoutError, PeerError
rank, victim = int(os.environ["RANK"]), int(os.environ["RANK"]) == 1
count = 2_000_000
def stop_me(after_s, for_s):
    me = os.getpid()
    steps = f"sleep {after_s}; kill -STOP {me}; sleep {for_s}; kill -CONT {me}"
    subprocess.Popen(["sh", "-c", steps])
"""


@pytest.mark.exact
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_peer_that_is_stopped_in_large_collectives_corrupts_nothing(
    launch: Launch, backend: str, seed: int
) -> None:
    script = launch.script(
        f"{STOPPED}"
        f"dist.init_process_group('{backend}')\n"
        f"chance = random.Random({seed})\n"
        "if victim:\n"
        "    for number in range(4):\n"
        "        stop_me(0.1 + number / 2 + chance.random() / 3, 0.15)\n"
        "begin, number, done = time.monotonic(), 0, np.zeros(1)\n"
        "while not done[0]:\n"
        "    mine = np.full(count, rank + number, np.float32)\n"
        "    dist.all_reduce(mine)\n"
        "    assert (mine == 3 * number + 3).all(), number\n"
        "    whole = np.empty((3, count), np.float32)\n"
        "    dist.all_gather_into_tensor(whole, np.full(count, rank + number, np.float32))\n"
        "    assert (whole == np.arange(3)[:, None] + number).all(), number\n"
        "    got = np.empty(count, np.float32)\n"
        "    works = [dist.isend(mine, (rank + 1) % 3), dist.irecv(got, (rank - 1) % 3)]\n"
        "    for work in works: work.wait()\n"
        "    assert (got == 3 * number + 3).all(), number\n"
        "    number += 1\n"
        "    done[0] = time.monotonic() - begin > 2.6\n"
        "    dist.broadcast(done, 0)\n"
        "open(f'done.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 3


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_peer_that_goes_on_after_the_timeout_touches_nobodys_memory(
    launch: Launch, backend: str
) -> None:
    script = launch.script(
        f"{STOPPED}"
        f"dist.init_process_group('{backend}')\n"
        "arrays = [np.ones(count, np.float32) for _ in range(4)]\n"
        "dist.all_reduce(arrays[0])\n"
        "dist.group.WORLD.set_timeout(timedelta(seconds=1))\n"
        "if victim: stop_me(0.05, 3)\n"
        "begin = time.monotonic()\n"
        "try:\n"
        "    while time.monotonic() - begin < 60:\n"
        "        works = [dist.all_reduce(array, async_op=True) for array in arrays]\n"
        "        for work in works: work.wait()\n"
        "        right, left = (rank + 1) % 3, (rank - 1) % 3\n"
        "        other = dist.isend(arrays[0], right), dist.irecv(arrays[1], left)\n"
        "        for work in other: work.wait()\n"
        "except PeerError as error:\n"
        "    assert victim or isinstance(error, CollectiveTimeoutError), error\n"
        # Or the one who waits for it in a message, if another is at the next collective already.
        "    assert victim or error.rank in (0, 1), error\n"
        "else:\n"
        "    sys.exit('no error')\n"
        "for array in arrays: array[...] = -7\n"
        "dist.destroy_process_group()\n"
        "if victim: open('went on', 'w').close()\n"
        "while not os.path.exists('went on'): time.sleep(0.01)\n"
        "assert all((array == -7).all() for array in arrays)\n"
        "open(f'done.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 3
