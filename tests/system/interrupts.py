"""Interrupts one of two ranks, or both, at random instants, and sees what comes of it.

    python interrupts.py SEED COUNT

A program of its own that forks the ranks. Both run the same random collectives and messages and
check every result, until SIGINT comes to one: it catches KeyboardInterrupt, the other is told of
it, and both form the next group, in the same processes. What an interrupted call worked on must
stay as it was left. Writes a JSON object for each instant to stdout, one in a line.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np

import rallypoint as dist
from rallypoint.process_group.calls import collectives, exchanges, point_to_point  # noqa: F401
from rallypoint.process_group.formation import opening  # noqa: F401
from rallypoint.store.server import StoreServer

RANKS = 2
LONGEST_S = 20.0  # without an error, a rank gives up: it would be a hang
SIZES = (1, 3, 1000, 30_000, 300_000)
# By then a rank that was interrupted has said so, as in tests/conftest.py.
AGAIN_S = max(1.0, float(os.environ.get("RALLYPOINT_TEST_SOON_S", "10")) / 2)
UNTOUCHED = -7.0


class Rank:
    """One of the two, in all its groups."""

    def __init__(self, rank: int, out: int) -> None:
        self._rank, self._other, self._out = rank, 1 - rank, out
        self._operation = ""  # the one under way, or the last one
        self._used: list[np.ndarray] = []  # by it
        self._is_armed = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self._is_armed:
            raise KeyboardInterrupt

    def meet(self, seed: int) -> None:
        """Form a group, run operations until something ends that, and say what."""
        common, own = random.Random(seed), random.Random(seed * RANKS + self._rank)
        backend = common.choice(["shm", "tcp"])
        dist.init_process_group(backend, timeout=timedelta(seconds=LONGEST_S))
        dist.barrier()
        left, self._used = self._used, []
        told: dict[str, Any] = {"rank": self._rank, "backend": backend}
        try:
            try:
                self._is_armed = True
                os.write(self._out, b"ready\n")
                self._work(common, own)
            except Exception as error:
                told |= {"kind": type(error).__name__, "text": str(error)}
                told["culprit"] = getattr(error, "rank", None)
            self._is_armed = False
        except KeyboardInterrupt:
            self._is_armed = False
            told |= {"kind": "KeyboardInterrupt", "text": "", "culprit": self._rank}
        told |= {"at_s": time.monotonic(), "operation": self._operation}
        dist.destroy_process_group()
        if any((array != UNTOUCHED).any() for array in left):
            told |= {"kind": "AssertionError", "text": "written to after the group's end"}
        for array in self._used:
            array[...] = UNTOUCHED
        os.write(self._out, json.dumps(told).encode() + b"\n")

    def _work(self, common: random.Random, own: random.Random) -> None:
        ways = self._ways()
        while True:
            self._operation = common.choice(list(ways))
            size, value, root = common.choice(SIZES), common.randrange(100), common.randrange(RANKS)
            if common.randrange(RANKS) == self._rank:  # the other waits in most calls
                time.sleep(own.random() * own.choice([0.01, 0.1]))
            self._used = []
            ways[self._operation](size, value, root)

    def _array(self, size: int, value: float) -> np.ndarray:
        """Nobody may write there once the call has been interrupted."""
        self._used.append(np.full(size, value, np.float32))
        return self._used[-1]

    def _ways(self) -> dict[str, Callable[[int, int, int], None]]:
        """By name, what to do with so many numbers that follow from a value, and to check."""
        rank, other, array = self._rank, self._other, self._array

        def all_reduce(size: int, value: int, _: int) -> None:
            mine = array(size, value + rank)
            dist.all_reduce(mine)
            expect(mine, 2 * value + 1)

        def broadcast(size: int, value: int, root: int) -> None:
            mine = array(size, value if rank == root else -1)
            dist.broadcast(mine, root)
            expect(mine, value)

        def reduce(size: int, value: int, root: int) -> None:
            mine = array(size, value + rank)
            dist.reduce(mine, root)
            if rank == root:
                expect(mine, 2 * value + 1)

        def all_gather(size: int, value: int, _: int) -> None:
            parts = [array(size, -1) for _ in range(RANKS)]
            dist.all_gather(parts, array(size, value + rank))
            for each, part in enumerate(parts):
                expect(part, value + each)

        def reduce_scatter(size: int, value: int, _: int) -> None:
            mine = array(size, -1)
            dist.reduce_scatter(mine, [array(size, value + each + rank) for each in range(RANKS)])
            expect(mine, 2 * (value + rank) + 1)

        def all_to_all(size: int, value: int, _: int) -> None:
            parts = [array(size, -1) for _ in range(RANKS)]
            dist.all_to_all(parts, [array(size, value + 2 * rank + each) for each in range(RANKS)])
            for each, part in enumerate(parts):
                expect(part, value + 2 * each + rank)

        def barrier(*_: int) -> None:
            dist.barrier()

        def message(size: int, value: int, root: int) -> None:
            mine = array(size, value if rank == root else -1)
            if rank == root:
                dist.send(mine, other, tag=value)
            else:
                dist.recv(mine, other, tag=value)
            expect(mine, value)

        # These two may still be under way after Ctrl-C: their arrays are not to be touched.
        def messages(size: int, value: int, _: int) -> None:
            mine, theirs = np.full((2, size), value + rank, np.float32)
            for work in (dist.isend(mine, other), dist.irecv(theirs, other)):
                assert work is not None
                work.wait()
            expect(theirs, value + other)

        def background(size: int, value: int, _: int) -> None:
            several = [np.full(size, value + each + rank, np.float32) for each in range(3)]
            for work in [dist.all_reduce(each, async_op=True) for each in several]:
                assert work is not None
                work.wait()
            for each, mine in enumerate(several):
                expect(mine, 2 * (value + each) + 1)

        ways = (all_reduce, broadcast, reduce, all_gather, reduce_scatter, all_to_all, barrier)
        return {way.__name__: way for way in (*ways, message, messages, background)}


def expect(array: np.ndarray, value: float) -> None:
    wrong = array != value
    if wrong.any():
        raise AssertionError(f"{array[wrong][0]} is not {value}, {wrong.sum()} of {len(array)}")


class Lines:
    """What a rank writes, line by line."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = b""

    def read(self, until_s: float) -> bytes:
        """The next line; empty if none comes by then."""
        while b"\n" not in self._text:
            patience_s = max(0.0, until_s - time.monotonic())
            if not select.select([self._descriptor], [], [], patience_s)[0]:
                return b""
            got = os.read(self._descriptor, 4096)
            if not got:
                return b""
            self._text += got
        line, _, self._text = self._text.partition(b"\n")
        return line


def fork_rank(rank: int, seeds: list[int]) -> tuple[int, Lines]:
    """Its process and what it writes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, Lines(reading)
    status = 1
    try:
        os.environ["RANK"] = str(rank)
        one = Rank(rank, writing)
        for seed in seeds:
            one.meet(seed)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def interrupt(ranks: list[tuple[int, Lines]], victims: list[int]) -> dict[str, Any]:
    """Send SIGINT until each rank has said what it saw."""
    sent_s = time.monotonic()
    lines: dict[int, bytes] = {}
    times = 0
    while len(lines) < RANKS and time.monotonic() < sent_s + 2 * LONGEST_S:
        # Python drops what a handler raises while something is being collected.
        for victim in set(victims) - lines.keys():
            os.kill(ranks[victim][0], signal.SIGINT)
        times += 1
        until_s = time.monotonic() + AGAIN_S
        for rank, (_, output) in enumerate(ranks):
            if rank not in lines and (line := output.read(until_s)):
                lines[rank] = line
    told = [json.loads(line) for line in lines.values()]
    for each in told:
        each["after_s"] = each.pop("at_s") - sent_s
    return {"victims": victims, "times": times, "told": told}


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    chance = random.Random(seed)
    server = StoreServer()
    os.environ |= {
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    seeds = [chance.randrange(1 << 30) for _ in range(count)]
    ranks = [fork_rank(rank, seeds) for rank in range(RANKS)]
    is_well = True
    for _ in range(count):
        until_s = time.monotonic() + LONGEST_S
        is_well = all(output.read(until_s) == b"ready" for _, output in ranks)
        if not is_well:
            break
        time.sleep(chance.random() * chance.choice([0.001, 0.1]))
        seen = interrupt(ranks, chance.choice([[0], [1], [0, 1]]))
        print(json.dumps(seen), flush=True)
        is_well = len(seen["told"]) == RANKS
        if not is_well:
            break
    for pid, _ in ranks:
        if not is_well:
            os.kill(pid, signal.SIGKILL)
        is_well &= os.waitpid(pid, 0)[1] == 0
    server.close()
    sys.exit(not is_well)


if __name__ == "__main__":
    main()
