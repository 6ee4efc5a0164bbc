"""Real processes that read large messages in each other's memory, and what ends that."""

from __future__ import annotations

import os
import random

import pytest
from tests.system.conftest import Launch

pytestmark = pytest.mark.system

WAYS = ["private", "arena"]


def head(way: str) -> str:
    return (
        "import os, random, signal, subprocess, sys, threading, time\n"
        "import numpy as np\n"
        f"os.environ['RALLYPOINT_DIRECT'] = '{'1' if way == 'private' else ''}'\n"
        "import rallypoint as dist\n"
        f"new = dist.empty if '{way}' == 'arena' else np.empty\n"
    )


@pytest.mark.exact
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.everyday), 4])
def test_random_calls(launch: Launch, way: str, ranks: int, seed: int) -> None:
    script = launch.script(
        head(way) + "dist.init_process_group()\n"
        "rank, ranks = dist.get_rank(), dist.get_world_size()\n"
        "seed = int(sys.argv[1])\n"
        "rng = random.Random(seed)\n"
        "def filled(items, *key):\n"
        "    array = new(items, np.float32)\n"
        "    array[...] = np.random.default_rng([seed, *key]).integers(-99, 99, items)\n"
        "    return array\n"
        "for number in range(15):\n"
        "    n, root = rng.choice([7, 9_000, 70_001, 600_000]), rng.randrange(ranks)\n"
        "    mine = filled(n, number, rank)\n"
        "    all_of = np.stack([filled(n, number, r) for r in range(ranks)])\n"
        "    dist.all_reduce(mine)\n"
        "    np.testing.assert_array_equal(mine, all_of.sum(0))\n"
        "    told = filled(n, number, rank)\n"
        "    dist.broadcast(told, root)\n"
        "    np.testing.assert_array_equal(told, all_of[root])\n"
        "    every = new((ranks, n), np.float32)\n"
        "    work = dist.all_gather_into_tensor(every, filled(n, number, rank), async_op=True)\n"
        "    work.wait()\n"
        "    np.testing.assert_array_equal(every, all_of)\n"
        "    wide = filled(n * ranks, number, rank)\n"
        "    part = new(n, np.float32)\n"
        "    dist.reduce_scatter_tensor(part, wide)\n"
        "    wides = sum(filled(n * ranks, number, r) for r in range(ranks))\n"
        "    np.testing.assert_array_equal(part, wides[rank * n:(rank + 1) * n])\n"
        "    to = (root + 1) % ranks\n"
        "    if rank == root: dist.send(filled(n, number, root), to)\n"
        "    if rank == to:\n"
        "        assert dist.recv(part) == root\n"
        "        np.testing.assert_array_equal(part, all_of[root])\n"
        "dist.destroy_process_group()\n"
        "open(f'done.{rank}', 'w').close()\n"
    )
    assert launch.run("--nproc-per-node", str(ranks), script, str(seed)) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == ranks


@pytest.mark.parametrize("way", WAYS)
def test_death_in_the_middle(launch: Launch, way: str) -> None:
    script = launch.script(
        head(way) + "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's\n"
        "dist.init_process_group()\n"
        "rank = dist.get_rank()\n"
        "values = new(2_000_000, np.int64)\n"
        "values[...] = 0\n"
        "begun, number = threading.Event(), 0\n"
        "def die():\n"
        "    begun.wait()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if rank == 2: threading.Thread(target=die).start()\n"
        "try:\n"
        "    while True:\n"
        "        dist.all_reduce(values)\n"
        "        assert (values == 0).all()\n"
        "        number += 1\n"
        "        if number == 10: begun.set()\n"
        "except dist.PeerLostError as error:\n"
        "    assert error.rank == 2, error\n"
        "    open(f'told.{rank}', 'w').close()\n"
        "    os._exit(0)\n"
    )
    launch.run("--nproc-per-node", "3", script)
    assert len(list(launch.directory.glob("told.*"))) == 2, launch.err


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", ["broadcast", "send"])
def test_who_was_stopped_uses_nothing_that_was_given_up(
    launch: Launch, way: str, call: str, seed: int
) -> None:
    """Rank 1 is stopped while it reads; rank 0 gives up and fills its array with something else.

    Rank 1, continued, must end with an error, or with what rank 0 had sent.
    """
    delay_s = random.Random(seed).uniform(0.005, 0.04)
    script = launch.script(
        head(way) + "from datetime import timedelta\n"
        "dist.init_process_group()\n"
        "rank, me = dist.get_rank(), os.getpid()\n"
        "values = new(3_000_000, np.int64)\n"
        "dist.barrier()\n"
        "if rank == 1:\n"
        "    stopper = subprocess.Popen(['sh', '-c',\n"
        f"        f'sleep {delay_s}; kill -STOP {{me}}; sleep 1.5; kill -CONT {{me}}'])\n"
        "try:\n"
        "    for number in range(100_000):\n"
        "        values[...] = number if rank == 0 else -1\n"
        "        timeout = timedelta(seconds=0.5)\n"
        f"        if '{call}' == 'broadcast': dist.broadcast(values, 0, timeout=timeout)\n"
        "        elif rank == 0: dist.send(values, 1, timeout=timeout)\n"
        "        else: dist.recv(values, 0, timeout=timeout)\n"
        "        assert (values == number).all(), 'spoilt'\n"
        "except dist.PeerError as error:\n"
        "    values[...] = -7\n"
        "    open(f'told.{rank}', 'w').close()\n"
        "if rank == 1: stopper.wait()\n"
        "else: time.sleep(2)\n"
        "os._exit(0)\n"
    )
    assert launch.run("--nproc-per-node", "2", script) == 0, launch.err
    assert len(list(launch.directory.glob("told.*"))) == 2


@pytest.mark.needs_torch
def test_a_relay_whose_memory_others_cannot_read_passes_it_on_all_the_same(
    launch: Launch,
) -> None:
    """Memory that may only be written: its owner's processor reads it, another process cannot."""
    script = launch.script(
        head("private") + "import mmap, torch, torch.distributed as dist\n"
        "dist.init_process_group('rallypoint')\n"
        "items = 1 << 20\n"
        "private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS\n"
        "memory = mmap.mmap(-1, 4 * items, flags=private, prot=mmap.PROT_WRITE)\n"
        "sent = np.arange(items, dtype=np.float32)\n"
        "told = sent if dist.get_rank() == 0 else np.frombuffer(memory, np.float32)\n"
        "dist.broadcast(torch.from_numpy(told), 0)\n"
        "np.testing.assert_array_equal(told, sent)\n"
        "dist.destroy_process_group()\n"
        "open(f'done.{os.environ[\"RANK\"]}', 'w').close()\n",
    )
    environ = os.environ | {"RALLYPOINT_ALGORITHM": "two_tree"}  # ranks pass it on to others
    assert launch.run("--nproc-per-node", "4", script, environ=environ) == 0, launch.err
    assert len(list(launch.directory.glob("done.*"))) == 4
