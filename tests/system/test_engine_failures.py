"""Real processes that die, stop, or wait for each other, in the middle of messages."""

from __future__ import annotations

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system


@pytest.mark.parametrize("count", [10, 300_000])
def test_death_in_the_middle_of_messages(launch: Launch, count: int) -> None:
    """In the envelope, and while the receiver reads the sender's memory."""
    script = launch.script(
        "import os, sys, threading, time, numpy as np, rallypoint as dist\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        f"values = np.ones({count})\n"
        "if rank == 2:\n"
        "    threading.Timer(0.3, os._exit, (0,)).start()\n"
        "try:\n"
        "    while True:\n"
        "        begin = time.monotonic()\n"
        "        if rank == 0: dist.send(values, 1)\n"
        "        dist.recv(values, (rank - 1) % 3)\n"
        "        assert (values == 1).all()\n"
        "        if rank: dist.send(values, (rank + 1) % 3)\n"
        "except dist.PeerLostError as error:\n"
        "    assert error.rank == 2, error\n"
        "    assert time.monotonic() - begin < 1.5\n"
        "    open(f'told.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", "3", script) == 0, launch.err
    assert len(list(launch.directory.glob("told.*"))) == 2
    assert launch.left_over() == []


def test_the_classic_deadlock_is_explained(launch: Launch) -> None:
    script = launch.script(
        "import time, numpy as np, rallypoint as dist\n"
        "from rallypoint.base.errors import DeadlockError\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "begin = time.monotonic()\n"
        "try:\n"
        "    dist.recv(np.ones(3), 1 - rank)\n"
        "except DeadlockError as error:\n"
        "    assert 'rank 0 is in recv from rank 1, tag 0' in str(error), error\n"
        "    assert time.monotonic() - begin < 1.5\n"
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
