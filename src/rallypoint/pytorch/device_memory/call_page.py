"""The page on which the ranks of a call meet: the last to arrive works for all.

Each rank leaves its request there. Three numbers, for all, change under a lock on the page's file.
So either the last rank to arrive sees that another one has left its call with an error, and does
not begin; or the rank that leaves sees who works, and waits for the end of the work or the process.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_NUMBERS = struct.Struct("<3I")
_ARRIVED, _WORKER, _LEFT = range(3)  # how many ranks; its rank plus 1, or 0; whether a rank has
_CHECK_EVERY_S = 0.001


class CallPage:
    """One rank's view of the page, which belongs to one call after the other.

    Args:
        descriptor: of the page's file, opened by this rank alone; taken over.
        pids: of the processes, by rank.
        request_bytes: the most that a request may have.
    """

    def __init__(self, descriptor: int, rank: int, pids: Sequence[int], request_bytes: int) -> None:
        self._descriptor, self._rank, self._pids = descriptor, rank, pids
        self._request_bytes = request_bytes

    @staticmethod
    def size(ranks: int, request_bytes: int) -> int:
        """Of its file, in bytes."""
        return _NUMBERS.size + ranks * request_bytes

    def arrive(self, request: bytes) -> list[bytes] | None:
        """Leave a request; returns those of all ranks if this one is to work, until it calls `end`.

        Each is followed by other bytes, up to the most.
        No other rank arrives at the next call before all know that this one is done.
        """
        size, ranks = self._request_bytes, len(self._pids)
        os.pwrite(self._descriptor, request, _NUMBERS.size + self._rank * size)
        with self._changed() as numbers:
            numbers[_ARRIVED] += 1
            if numbers[_ARRIVED] < ranks or numbers[_LEFT]:
                return None
            numbers[_ARRIVED], numbers[_WORKER] = 0, self._rank + 1
        data = os.pread(self._descriptor, ranks * size, _NUMBERS.size)
        return [data[rank * size : (rank + 1) * size] for rank in range(ranks)]

    def end(self) -> None:
        """This rank's work is done."""
        with self._changed() as numbers:
            numbers[_WORKER] = 0

    def leave(self) -> None:
        """Keep others from beginning to work, and wait for a rank that works, unless it has died.

        What this rank has begun must be over.
        """
        with self._changed() as numbers:
            numbers[_LEFT] = 1
            if numbers[_WORKER] == self._rank + 1:
                numbers[_WORKER] = 0
        while (worker := self._read()[_WORKER]) and not has_ended(self._pids[worker - 1]):
            time.sleep(_CHECK_EVERY_S)

    def __del__(self) -> None:
        os.close(self._descriptor)  # not before: another thread may be in a call

    def _read(self) -> list[int]:
        return list(_NUMBERS.unpack(os.pread(self._descriptor, _NUMBERS.size, 0)))

    @contextmanager
    def _changed(self) -> Iterator[list[int]]:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # which a death unlocks
        try:
            numbers = self._read()
            yield numbers
            os.pwrite(self._descriptor, _NUMBERS.pack(*numbers), 0)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def has_ended(pid: int) -> bool:
    """Whether a process has ended with all its threads: then it has given up its device."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (OSError, AttributeError):  # there are none here: ended once its parent has noticed
        return not os.path.exists(f"/proc/{pid}")  # noqa: PTH110 - it is no file
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)
