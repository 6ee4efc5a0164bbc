"""Has signal handlers communicate: rank 0 is in one call when a handler makes another.

    python handlers.py DOOR SIZE PAIR...

DOOR is "arrays" (our own API) or "torch" (PyTorch's backend), SIZE how many items arrays have, and
a PAIR the names of two calls, as in "barrier:all_reduce": rank 0 begins the first one, which cannot
complete before rank 1 has begun it, too. Rank 1 waits until rank 0 sleeps, sends it a signal, and
waits for its handler, which makes the second call. Only then does rank 1 make both, one after the
other. Writes one line for each pair to stdout: the pair, and what came of the handler's call.

A program of its own that forks the ranks.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from rallypoint.base.errors import CallerError
from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer

CALLS = ("all_reduce", "barrier", "receive", "wait", "objects", "new_group", "store")
# torch's store waits in C++, where no handler runs: it does when the call returns.
DEFERRING = {"arrays": set[str](), "torch": {"store"}}
LONGEST_S = 60.0  # for one pair
STORE_S = 2.0  # how long a store call waits, which nothing else ends
OUTCOMES = ("", "made", "refused", "timed out")
_WORD = struct.Struct("<q")


class Page:
    """What the ranks tell each other without a call: which pair each is at, and how far."""

    ENTERED, HANDLING, OUTCOME, PID = range(4)

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def tell(self, word: int, value: int) -> None:
        _WORD.pack_into(self._memory, 8 * word, value)

    def read(self, word: int) -> int:
        return int(_WORD.unpack_from(self._memory, 8 * word)[0])

    def await_value(self, word: int, value: int) -> None:
        until = time.monotonic() + LONGEST_S
        while self.read(word) != value:
            assert time.monotonic() < until, (word, value)
            time.sleep(0.001)


class Door:
    """The calls, alike on both ranks; each checks what it got. `number` is different each time."""

    def __init__(self, name: str, rank: int, size: int, port: int) -> None:
        self._rank, self._other, self._size = rank, 1 - rank, size
        self._groups: dict[int, Any] = {}
        if name == "torch":
            import torch
            import torch.distributed as dist

            self._dist: Any = dist
            self._full: Callable[..., Any] = lambda value: torch.full((size,), float(value))
            self._store: Any = dist.TCPStore(
                "127.0.0.1", port, timeout=timedelta(seconds=STORE_S), wait_for_workers=False
            )
        else:
            import rallypoint

            self._dist = rallypoint
            self._full = lambda value: np.full(size, value, np.float32)
            self._store = TCPStore(
                "127.0.0.1", port, timeout=timedelta(seconds=STORE_S), wait_for_workers=False
            )
        self._dist.init_process_group(
            "rallypoint",
            init_method=f"tcp://127.0.0.1:{port}" if name == "torch" else None,
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=LONGEST_S),
        )

    def all_reduce(self, number: int, group: Any = None) -> None:
        array = self._full(self._rank + number)
        self._dist.all_reduce(array, group=group)
        expect(array, 2 * number + 1)

    def barrier(self, _: int) -> None:
        self._dist.barrier()

    def receive(self, number: int, *, source: int = 1) -> None:
        array = self._full(number)
        if self._rank == source:
            self._dist.send(array, self._other)
        else:
            array[:] = -1
            self._dist.recv(array, self._other)
        expect(array, number)

    def send(self, number: int) -> None:
        self.receive(number, source=0)

    def wait(self, number: int) -> None:
        arrays = [self._full(self._rank + number + each) for each in range(3)]
        works = [self._dist.all_reduce(array, async_op=True) for array in arrays]
        for each, work in enumerate(works):
            work.wait()
            expect(arrays[each], 2 * (number + each) + 1)

    def objects(self, number: int) -> None:
        told: list[Any] = [None, None]
        self._dist.all_gather_object(told, {"rank": self._rank, "number": number})
        assert told == [{"rank": rank, "number": number} for rank in range(2)], told

    def new_group(self, number: int) -> None:
        self._groups[number] = self._dist.new_group([0, 1])

    def settle(self) -> None:
        """After a pair, use the groups that it has formed: no call of the other rank's waits for
        that.
        """
        for number, group in sorted(self._groups.items()):
            self.all_reduce(number, group)
            self._dist.destroy_process_group(group)
        self._groups.clear()
        self._dist.barrier()

    def store(self, number: int) -> None:
        if self._rank == 0:
            assert self._store.get(f"key/{number}") == b"%d" % number
        else:
            self._store.set(f"key/{number}", str(number))


def expect(array: Any, value: float) -> None:
    assert bool((array == value).all()), f"{array[:4]} is not {value}"


class Interrupted:
    """Rank 0."""

    def __init__(self, door: Door, page: Page) -> None:
        self._door, self._page = door, page

    def go_through(self, number: int, outer: str, inner: str) -> str:
        page = self._page

        def handle(*_: object) -> None:
            page.tell(Page.HANDLING, number)
            outcome = "made"
            try:
                getattr(self._door, inner)(2 * number + 1)
            except CallerError as error:
                assert inner in str(error) or "handler" in str(error), error
                outcome = "refused"
            except Exception as error:
                if inner != "store":
                    raise
                assert "time" in str(error).lower(), error
                outcome = "timed out"
            page.tell(Page.OUTCOME, OUTCOMES.index(outcome))

        page.tell(Page.OUTCOME, 0)
        signal.signal(signal.SIGUSR1, handle)
        page.tell(Page.ENTERED, number)
        getattr(self._door, outer)(2 * number)
        until = time.monotonic() + LONGEST_S
        while page.read(Page.OUTCOME) == 0:
            assert time.monotonic() < until
            time.sleep(0.001)
        return OUTCOMES[page.read(Page.OUTCOME)]


class Interrupting:
    """Rank 1."""

    def __init__(self, door: Door, page: Page, defers: set[str]) -> None:
        self._door, self._page, self._defers = door, page, defers

    def go_through(self, number: int, outer: str, inner: str) -> None:
        self._page.await_value(Page.ENTERED, number)
        pid = self._page.read(Page.PID)
        await_sleep(pid)
        os.kill(pid, signal.SIGUSR1)
        if outer not in self._defers:
            self._page.await_value(Page.HANDLING, number)
        getattr(self._door, outer)(2 * number)
        if OUTCOMES[self._page.read(Page.OUTCOME)] in ("", "made"):
            getattr(self._door, inner)(2 * number + 1)


def await_sleep(pid: int) -> None:
    """Until the main thread of a process does nothing but sleep for some milliseconds."""
    seen, times = "", 0
    until = time.monotonic() + LONGEST_S
    while times < 5:
        assert time.monotonic() < until
        fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
        now = " ".join([fields[0], *fields[11:13]])  # its state, and its time on a CPU
        times = times + 1 if now == seen and fields[0] == "S" else 0
        seen = now
        time.sleep(0.003)


def work(rank: int, door_name: str, size: int, pairs: list[str], page: Page, port: int) -> None:
    faulthandler.register(signal.SIGUSR2)
    if rank == 0:
        page.tell(Page.PID, os.getpid())
    door = Door(door_name, rank, size, port)
    ranks: Any = (
        Interrupted(door, page) if rank == 0 else Interrupting(door, page, DEFERRING[door_name])
    )
    for number, pair in enumerate(pairs, 1):
        outer, _, inner = pair.partition(":")
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        try:
            outcome = ranks.go_through(number, outer, inner)
        except BaseException as error:
            error.add_note(f"rank {rank}, {pair}")
            raise
        if rank == 0:
            print(pair, outcome, flush=True)
        door.settle()
    faulthandler.cancel_dump_traceback_later()
    door._dist.destroy_process_group()


def main() -> None:
    door, size, *pairs = sys.argv[1:]
    if door == "torch":
        import torch  # noqa: F401 - once for both

        server: Any = None
        from torch.distributed import TCPStore as TorchStore

        server = TorchStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    else:
        server = StoreServer()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(server.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    page = Page()
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                work(rank, door, int(size), pairs, page, server.port)
                status = 0
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(status)
        pids.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
