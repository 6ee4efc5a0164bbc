"""Keeps a rank in a call that has failed while another may still write into its memory.

A page that the ranks share has two bytes for each: it works in others' memory, and it has left.
They are changed under a lock on the page's file. So either a worker sees that a rank has left, and
does not begin, or the rank that leaves sees that it works, and waits for its end or its death.
"""

from __future__ import annotations

import fcntl
import os
import select
import time
from collections.abc import Sequence

_CHECK_EVERY_S = 0.001


class WorkGuard:
    """One rank's view of the page.

    Args:
        descriptor: of the page's file, opened by this rank alone; taken over.
        pids: of the processes, by rank.
    """

    def __init__(self, descriptor: int, rank: int, pids: Sequence[int]) -> None:
        self._descriptor, self._rank, self._pids = descriptor, rank, pids

    def begin(self) -> bool:
        """This rank is about to work; False: it must not, as a rank has left."""
        with self:
            if any(self._read(len(self._pids))):
                return False
            self._write(self._rank, 1)
            return True

    def end(self) -> None:
        """This rank's work is done."""
        self._write(self._rank, 0)

    def leave(self) -> None:
        """Keep others from beginning to work, and wait for whoever works, unless it has died."""
        with self:
            self._write(len(self._pids) + self._rank, 1)
        for peer, pid in enumerate(self._pids):
            while peer != self._rank and self._read(0)[peer] and not has_ended(pid):
                time.sleep(_CHECK_EVERY_S)

    def close(self) -> None:
        """The rank has left, or all have."""
        os.close(self._descriptor)

    def __enter__(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # which a death unlocks

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _read(self, offset: int) -> bytes:
        return os.pread(self._descriptor, len(self._pids), offset)

    def _write(self, offset: int, value: int) -> None:
        os.pwrite(self._descriptor, bytes([value]), offset)


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
