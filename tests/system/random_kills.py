"""Kills one rank of a group at a random moment, again and again, and sees what the others are told.

    python random_kills.py SEED KILLS RANKS

A program of its own that forks the ranks, so that one costs milliseconds and not the start of an
interpreter. They run random collectives and messages, the same on every rank, until an error.
Writes a JSON object for each kill to stdout, one in a line.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import rallypoint as dist
from rallypoint.process_group.calls import collectives, exchanges, point_to_point  # noqa: F401
from rallypoint.process_group.formation import opening  # noqa: F401
from rallypoint.store.server import StoreServer

LONGEST_S = 20.0  # without an error, a rank gives up: it would be a hang
SIZES = (1, 3, 1000, 20_000, 300_000, 3_000_000)


def operations(rank: int, ranks: int) -> dict[str, Callable[[np.ndarray, int], object]]:
    """By name, what to do with an array, given a root."""
    right, left = (rank + 1) % ranks, (rank - 1) % ranks

    def messages(array: np.ndarray, _: int) -> None:
        works = [dist.isend(array, right), dist.irecv(np.empty_like(array), left)]
        for work in works:
            assert work is not None
            work.wait()

    def background(array: np.ndarray, _: int) -> None:
        several = [dist.all_reduce(array.copy(), async_op=True) for _ in range(4)]
        for work in several:
            assert work is not None
            work.wait()

    return {
        "all_reduce": lambda array, _: dist.all_reduce(array),
        "broadcast": lambda array, root: dist.broadcast(array, root),
        "reduce": lambda array, root: dist.reduce(array, root),
        "all_gather": lambda array, _: dist.all_gather(
            [np.empty_like(array) for _ in range(ranks)], array
        ),
        "reduce_scatter": lambda array, _: dist.reduce_scatter(array.copy(), [array] * ranks),
        "all_to_all": lambda array, _: dist.all_to_all(
            [np.empty_like(array) for _ in range(ranks)], [array] * ranks
        ),
        "barrier": lambda *_: dist.barrier(),
        "messages": messages,
        "background": background,
    }


def be_a_rank(rank: int, ranks: int, seed: int, backend: str, out: int) -> None:
    """Say that it is there; run operations until there is an error; say which."""
    dist.init_process_group(backend, timeout=timedelta(seconds=LONGEST_S))
    common, own = random.Random(seed), random.Random(seed * ranks + rank)
    ways = operations(rank, ranks)
    arrays = {size: np.ones(size, np.float32) for size in SIZES}
    for array in arrays.values():
        dist.all_reduce(array)
        array[...] = 1
    os.write(out, b"ready\n")
    name = ""
    try:
        while True:
            name = common.choice(list(ways))
            array = arrays[common.choice(SIZES)]
            if own.random() < 0.1:
                time.sleep(own.random() / 500)
            ways[name](array, common.randrange(ranks))
            array[...] = 1
    except Exception as error:
        told: dict[str, Any] = {
            "rank": rank,
            "at_s": time.monotonic(),
            "kind": type(error).__name__,
            "culprit": getattr(error, "rank", None),
            "in": name,
            "text": str(error),
        }
        os.write(out, json.dumps(told).encode() + b"\n")
    dist.destroy_process_group()


def fork_rank(number: int, rank: int, ranks: int, seed: int, backend: str) -> tuple[int, int]:
    """Its process and what to read it by."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.environ |= {"RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": str(number)}
        be_a_rank(rank, ranks, seed, backend, writing)
        status = 0
    finally:
        os._exit(status)


def read_line(descriptor: int, until_s: float) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        if not select.select([descriptor], [], [], max(0.0, until_s - time.monotonic()))[0]:
            return b""
        got = os.read(descriptor, 4096)
        if not got:
            return b""
        text += got
    return text


def kill_one(number: int, ranks: int, chance: random.Random) -> dict[str, Any]:
    seed, backend = chance.randrange(1 << 30), chance.choice(["shm", "shm", "tcp"])
    victim = chance.randrange(ranks)
    children = [fork_rank(number, rank, ranks, seed, backend) for rank in range(ranks)]
    until_s = time.monotonic() + LONGEST_S
    ready = [read_line(reading, until_s) for _, reading in children]
    time.sleep(chance.random() * 0.1)
    killed_s = time.monotonic()
    os.kill(children[victim][0], signal.SIGKILL)
    # The kernel takes its time, more so on a busy machine; before, nobody can know.
    os.waitid(os.P_PID, children[victim][0], os.WEXITED | os.WNOWAIT)
    dead_s = time.monotonic()
    told = []
    for rank, (_, reading) in enumerate(children):
        line = b"" if rank == victim else read_line(reading, killed_s + 2 * LONGEST_S)
        if line:
            told.append(json.loads(line))
            told[-1]["after_s"] = told[-1].pop("at_s") - dead_s
    statuses = []
    for pid, reading in children:
        os.close(reading)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return {
        "number": number,
        "backend": backend,
        "victim": victim,
        "dying_s": dead_s - killed_s,
        "ready": sum(line == b"ready\n" for line in ready),
        "told": told,
        "statuses": statuses,
    }


def main() -> None:
    seed, kills, ranks = map(int, sys.argv[1:])
    chance = random.Random(seed)
    server = StoreServer()
    os.environ |= {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    for number in range(kills):
        print(json.dumps(kill_one(number, ranks, chance)), flush=True)
    server.close()


if __name__ == "__main__":
    main()
