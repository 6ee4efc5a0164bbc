"""What other threads hand to the thread of a selector's loop."""

from __future__ import annotations

import os
from _thread import RLock  # the launcher does without threading
from collections import deque
from collections.abc import Iterator

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Generic, TypeVar

    T = TypeVar("T")
else:
    T, Generic = 0, {0: object}


class Inbox(Generic[T]):
    """A queue with a descriptor: once `fileno()` is readable, the loop calls `take`."""

    _bell = -1

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._lock = RLock()  # guards the descriptor; a finalizer may `put` while it is held
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._bell

    def put(self, item: T) -> None:
        """Hand that over, from any thread; never waits."""
        self._items.append(item)
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    def take(self) -> Iterator[T]:
        """What has come so far, in that order; also what comes meanwhile."""
        try:
            os.eventfd_read(self._bell)
        except BlockingIOError:
            return
        while self._items:
            yield self._items.popleft()

    def close(self) -> None:
        """Nobody takes any more; what is handed over from now on is lost."""
        with self._lock:
            bell, self._bell = self._bell, -1
            if bell >= 0:
                os.close(bell)

    __del__ = close
