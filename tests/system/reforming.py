"""One rank of a job that forms its default group again; for test_reforming.py.

python reforming.py WHAT ARGUMENT: what it learns it prints, a JSON object a line; "ready" first.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import select
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np

import rallypoint as dist
from rallypoint.process_group.formation import shrinking
from rallypoint.process_group.formation.joining import reform_world
from rallypoint.process_group.groups.group import ProcessGroup
from rallypoint.store.init_method import JoinedStore

WAIT = timedelta(seconds=60)


def say(**named: object) -> None:
    print(json.dumps(named), flush=True)


def again(group: ProcessGroup, kept: list[int], prefix: str) -> None:
    """Go on with these ranks of the group."""
    place = JoinedStore(
        store=group.world.store, rank=kept.index(group.rank()), world_size=len(kept)
    )
    reform_world(group, place, prefix, timeout=WAIT)


def held() -> list[int]:
    """Descriptors, mappings, threads, entries in /dev/shm, and KiB of memory."""
    gc.collect()
    here = Path("/proc/self")
    counts = [len(list((here / name).iterdir())) for name in ("fd", "map_files", "task")]
    (resident,) = [
        int(line.split()[1])
        for line in (here / "status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return [*counts, len(list(Path("/dev/shm").iterdir())), resident]


def collectives(seed: int, group: ProcessGroup) -> None:
    """Random ones, the same on all ranks, until one fails."""
    chance = random.Random(seed)
    size, me = group.size(), group.rank()
    for count in itertools.count():
        if count == 20:
            say(works=True)
        items = chance.choice([1, 100, 10_000, 300_000])
        mine, all_of_them = np.ones(items), np.ones(items * size)
        match chance.randrange(6):
            case 0:
                dist.all_reduce(mine)
            case 1:
                dist.broadcast(mine, src=chance.randrange(size))
            case 2:
                dist.all_gather_into_tensor(all_of_them, mine)
            case 3:
                dist.reduce_scatter_tensor(mine, all_of_them)
            case 4:
                dist.all_to_all_single(all_of_them, all_of_them.copy())
            case 5:
                work = dist.isend(mine, (me + 1) % size)
                dist.recv(all_of_them[:items], (me - 1) % size)
                assert work is not None
                work.wait()


def killed(group: ProcessGroup, seed: int) -> None:
    """A rank is killed in a random collective; the others continue with the same objects."""
    me, total = group.rank(), np.zeros(1000)
    identity = id(total)
    say(ready=os.getpid())
    try:
        collectives(seed, group)
    except dist.PeerLostError as error:
        assert error.lost == (error.rank,)
        lost = error.lost
        kept = [rank for rank in group.ranks if rank not in lost]
        again(group, kept, "after")
    total[:] = 10**me
    dist.all_reduce(total)
    assert (total == sum(10**rank for rank in kept)).all()
    assert id(total) == identity and dist.group.WORLD is group
    say(pid=os.getpid(), lost=lost, rank=dist.get_rank())
    dist.destroy_process_group()


def stopped(group: ProcessGroup, victim: int) -> None:
    """A rank is stopped, and continued once the others have formed the group without it."""
    me = group.rank()
    group.set_timeout(timedelta(seconds=1))
    say(ready=os.getpid())
    values = np.full(200_000, 10.0**me)
    error: BaseException | None = None
    try:
        while True:
            dist.all_reduce(values, dist.ReduceOp.MAX)
    except dist.PeerError as caught:
        error = caught
    if me == victim:  # continued: nothing that it still does may reach the others
        for _ in range(50):
            try:
                values[:] = -1e9
                dist.all_reduce(values)
            except dist.PeerError as caught:
                error = caught
        say(error=type(error).__name__)
        dist.destroy_process_group()
        return
    assert isinstance(error, dist.CollectiveTimeoutError), error
    again(group, [rank for rank in range(4) if rank != victim], "after")
    group.set_timeout(WAIT)
    expected = float(sum(10**rank for rank in range(4) if rank != victim))
    mine = np.empty_like(values)
    for count in range(10**9):
        mine[:] = 10.0**me
        dist.all_reduce(mine)
        assert (mine == expected).all(), mine
        if count == 0:
            say(formed=True)
        is_asked, _, _ = select.select([sys.stdin], [], [], 0)
        goes_on = np.array([not is_asked])
        dist.all_reduce(goes_on, dist.ReduceOp.MIN)
        if not goes_on:
            break
    say(good=count)
    dist.destroy_process_group()


def rounds(group: ProcessGroup, count: int) -> None:
    """So many rounds leave nothing behind."""
    say(ready=os.getpid())
    warm: list[int] = []
    for number in range(count):
        again(group, [1, 0], f"round {number}")
        value = np.array([1.0])
        dist.all_reduce(value)
        work = dist.all_reduce(np.ones(100), async_op=True)
        assert value == [2] and work is not None and work.wait()
        if number == count // 4:
            dist.barrier()
            warm = held()
            dist.barrier()
    dist.barrier()
    say(warm=warm, last=held())
    dist.barrier()
    dist.destroy_process_group()


def agreeing(group: ProcessGroup, deaths: int) -> None:
    """Agree on flags, and then shrink the group, while so many ranks are killed."""
    say(ready=os.getpid())
    chance = random.Random(group.rank())
    agreed, sizes, after, size = list[int](), list[int](), 0, group.size()
    while after < 50:
        agreed.append(group.agree(chance.getrandbits(62) | 1 << group.rank()))
        after += group.agree(int(bool(group.communicator.gone())))
    while group.size() > size - deaths:
        group = dist.shrink_group()
        sizes.append(group.size())
    total = np.array([1])
    dist.all_reduce(total)
    assert dist.group.WORLD is group and total == [group.size()]
    say(agreed=agreed, sizes=sizes, rank=group.rank())
    dist.destroy_process_group()


def voting(group: ProcessGroup, victim: int) -> None:
    """A rank ends once the others have voted it into the next group."""
    say(ready=os.getpid())
    if group.rank() == victim:
        shrinking._formed = lambda *_: os._exit(0)
    began_s = time.monotonic()
    group = dist.shrink_group()
    say(size=group.size(), seconds=time.monotonic() - began_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    dist.init_process_group(timeout=WAIT)
    chosen = dist.group.WORLD
    assert chosen is not None
    whats = (killed, stopped, rounds, agreeing, voting)
    {each.__name__: each for each in whats}[sys.argv[1]](chosen, int(sys.argv[2]))
