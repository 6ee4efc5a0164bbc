"""The ranks of two jobs that exchange weights in device memory, on the stand-in for a GPU.

    device_weights.py JOB PORT exchange memory|host
    device_weights.py JOB PORT lose CALL VICTIM POINT

JOB is "train" or "serve"; each has a launcher of its own, and two ranks. Rank 0 of the trainers and
both servers form one group, the other trainer and a server another one, as OpenRLHF, verl and slime
do. "exchange" makes the calls that these make, and compares all results with NumPy's. With "lose",
the rank VICTIM (as in "serve 1", without the blank) is killed at a point of a call.
"""

import contextlib
import gc
import itertools
import os
import signal
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tests import stand_in
from tests.system.device_kills import Fragile
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.distributed_c10d import Backend, PrefixStore, _world

import rallypoint

COUNT, STEPS = 1 << 18, 3
LIMIT = timedelta(seconds=100)
job, port, what, *words = sys.argv[1:]
rank, own = int(os.environ["RANK"]), job + os.environ["RANK"]


def formed(name: str, members: list[str], store: Any) -> Any:
    """The group of these ranks, in which this one is; as the libraries form it."""
    size = len(members)
    group, _ = dist.distributed_c10d._new_process_group_helper(
        size,
        members.index(own),
        [],
        Backend("rallypoint"),
        PrefixStore(name, store),
        group_name=name,
        timeout=LIMIT,
    )
    _world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def values(who: int, step: int, count: int = COUNT) -> Any:
    """What a rank of a group has at a step, known to all."""
    return np.random.default_rng([who, step]).standard_normal(count).astype(np.float32)


def tensor(array: Any) -> Any:
    """A new tensor, whose memory can be exported."""
    return torch.tensor(array)


class Checked:
    """The results so far: right or not, and their bits."""

    def __init__(self) -> None:
        self.bits, self.wrong = 0, 0

    def equal(self, result: Any, wanted: Any) -> None:
        found = result.contiguous().view(torch.uint8).numpy().tobytes()
        self.bits = zlib.crc32(found, self.bits)
        self.wrong += found != wanted.contiguous().view(torch.uint8).numpy().tobytes()


def exchange(group: Any, step: int, seen: Checked) -> None:
    """The calls of one update. All tensors are new: those of the last update have been freed."""
    me, size = group.rank(), group.size()
    given = [tensor(values(who, step)) for who in range(size)]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        wanted = (given[0] * 100).to(dtype)
        weights = wanted.clone() if me == 0 else torch.zeros(COUNT, dtype=dtype)
        dist.broadcast(weights, 0, group=group)
        seen.equal(weights, wanted)

    # Many at once, as slime does; then in one flattened bucket.
    parts = [given[0][: 10 + 1000 * each].clone() for each in range(20)]
    for way in ("each", "bucket"):
        weights = [each.clone() if me == 0 else torch.zeros_like(each) for each in parts]
        if way == "each":
            works = [dist.broadcast(each, 0, group=group, async_op=True) for each in weights]
            for work in works:
                work.wait()
        else:
            flat = _flatten_dense_tensors(weights)
            dist.broadcast(flat, 0, group=group)
            weights = _unflatten_dense_tensors(flat, weights)
        for one, wanted in zip(weights, parts, strict=True):
            seen.equal(one, wanted)

    shards = [torch.empty(COUNT) for _ in range(size)]
    dist.all_gather(shards, given[me].clone(), group=group)
    whole = torch.empty(size * COUNT)
    dist.all_gather_into_tensor(whole, given[me].clone(), group=group)
    seen.equal(torch.cat(shards), torch.cat(given))
    seen.equal(whole, torch.cat(given))

    total = given[me].clone()
    dist.all_reduce(total, group=group)
    in_order = values(0, step)
    for who in range(1, size):
        in_order += values(who, step)
    seen.equal(total, tensor(in_order))

    for count in (100, COUNT):  # by way of the host, and in device memory
        received = torch.empty(count)
        for peer in range(1, size):
            there, back = given[0][:count].clone(), given[peer][:count].clone()
            if me == 0:
                dist.send(there, peer, group=group)
                dist.recv(received, peer, group=group)
                seen.equal(received, back)
            elif me == peer:
                dist.recv(received, 0, group=group)
                seen.equal(received, there)
                dist.send(back, 0, group=group)


def exchange_all(groups: dict[str, Any]) -> None:
    seen = Checked()
    if words[0] == "memory":
        stand_in.install()
    for step in range(STEPS):
        for group in groups.values():
            exchange(group, step, seen)
    kept = [open_in(group) for group in groups.values()] if words[0] == "memory" else []
    gc.collect()
    deadline = time.monotonic() + LIMIT.total_seconds()
    while any(kept):  # a second after the last call
        assert time.monotonic() < deadline, "freed memory of other ranks is still open"
        time.sleep(0.05)
    for group in groups.values():
        dist.barrier(group)
    say("exchanged", own, f"{seen.wrong} wrong, {seen.bits:08x}")


def open_in(group: Any) -> Any:
    """What is open here of the other ranks' memory."""
    calls = group.devices._calls["cpu"]
    assert calls._page is not None, "the trial has failed"
    return calls._mapped.memory.opened


def lose(group: Any) -> None:
    call, victim, point = words
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, which would end us before
    me, peers = group.rank(), range(1, group.size())
    weights = torch.zeros(COUNT)
    dist.broadcast(weights, 0, group=group)
    memory = Fragile.instance
    try:
        for turn in itertools.count():
            Path(f"up.{own}").touch()
            if own == victim and turn == 3:
                memory.armed = point
            weights = torch.full((COUNT,), float(turn) if me == 0 else -1.0)
            if call == "broadcast":
                dist.broadcast(weights, 0, group=group)
            elif me > 0:
                dist.recv(weights, 0, group=group)
            else:
                for peer in peers:
                    dist.send(weights, peer, group=group)
    except rallypoint.PeerLostError as error:
        found = f"rank {error.rank}"
        assert str(error).startswith(f"{found} (pid "), error  # of no "global ranks"
    before = weights.clone()
    time.sleep(0.1)
    assert torch.equal(before, weights), "memory was written after the error"
    if call == "send":
        group.devices._calls["cpu"]._mapped.close()  # within a second
    assert not memory.opened, "mappings are open"
    group.abort()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            assert "rallypoint-device" not in str(descriptor.readlink()), "the calls' page is open"
    say("told", own, found)


def say(*told: object) -> None:
    os.write(1, (" ".join(map(str, told)) + "\n").encode())


dist.init_process_group("rallypoint")
has_store = own == "train0"
store = dist.TCPStore("127.0.0.1", int(port), None, has_store, LIMIT, wait_for_workers=False)
known = {"weights": ["train0", "serve0", "serve1"], "pair": ["train1", "serve1"]}
made = {name: formed(name, all_, store) for name, all_ in known.items() if own in all_}
if what == "exchange":
    exchange_all({**made, "default": dist.group.WORLD})
else:
    stand_in.install(Fragile)
    if "weights" in made:
        lose(made["weights"])
    if not words[1].startswith(job):
        word = torch.ones(3)
        dist.all_reduce(word)  # the other job has its own group still
        assert word.tolist() == [2.0] * 3
dist.destroy_process_group()
