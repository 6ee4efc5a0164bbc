"""What each rank does in test_backends.py when something goes wrong.

    python backends_fail.py CASE BACKEND

Each rank says in one line how its call ended, and after how long.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np

import rallypoint as dist

LIMIT = timedelta(seconds=2)


def tell(call: Callable[[], object]) -> None:
    started = time.monotonic()
    try:
        call()
        how = "went well"
    except dist.RallypointError as error:
        how = f"{type(error).__name__}: {error}"
    taken_s = time.monotonic() - started
    os.write(1, f"rank {dist.get_rank()} after {taken_s:.1f} s: {how}\n".encode())


def summed(timeout: timedelta | None = None) -> None:
    dist.all_reduce(np.ones(10), timeout=timeout)


def killed(rank: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, before they have spoken
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(summed)
    tell(summed)  # the group is broken, and says the same


def left(rank: int) -> None:
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(2 * LIMIT.total_seconds())
    else:
        tell(lambda: summed(LIMIT))


def late(rank: int) -> None:
    if rank == 1:
        time.sleep(2 * LIMIT.total_seconds())
    else:
        tell(lambda: summed(LIMIT))


def lengths(rank: int) -> None:
    if rank == 1:
        tell(lambda: dist.recv(np.ones(10), 0))
    elif rank == 0:
        dist.send(np.ones(20), 1)


def mutual(rank: int) -> None:
    if rank < 2:
        # Of two that give up at once, either may see first that the other did.
        tell(lambda: dist.recv(np.ones(10), 1 - rank, timeout=LIMIT * (1 + rank)))
    else:
        time.sleep(2 * LIMIT.total_seconds())


def patience(rank: int) -> None:
    if rank == 1:
        time.sleep(1)
    work = dist.all_reduce(np.ones(10), async_op=True)
    assert work is not None
    if rank == 0:
        tell(lambda: work.wait(timedelta(seconds=0.2)))
    tell(work.wait)


case, backend = sys.argv[1:]
dist.init_process_group(backend, timeout=timedelta(seconds=60))
summed()
globals()[case](dist.get_rank())
