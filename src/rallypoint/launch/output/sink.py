"""A descriptor that may block, written to by a separate thread, so that nothing else waits for it.

    write(block) --> queue, at most MAX_BYTES --> thread --> terminal, pipe, file, hung file system

Blocks are whole lines; they are written in order and never split. When the queue is full, blocks
are dropped, and a note in their place says how much is missing. The thread lives while
there is something to write, so it costs nothing without output.
"""

from __future__ import annotations

import atexit
import errno
import os
import select
from _thread import allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable

MAX_BYTES = 4 << 20
_CHUNK_BYTES = 64 << 10
_LAST_WORDS_S = 1.0  # for a process that ends without notice
_PASSES = (errno.ENOSPC, errno.EDQUOT)  # later there may be room again
_GAP = b""  # a mark in the queue: something was dropped here


def _note(lost: int) -> bytes:
    return (
        f"rallypoint: {lost} bytes of output are missing here, because nothing read them\n".encode()
    )


class Sink:
    """The descriptor, which remains the caller's; `gap` makes the text for that many lost bytes.

    Attributes:
        pending: how many bytes wait.
        error: the descriptor's last one; what was to be written then is lost.
        is_broken: the reader has gone, and everything is dropped silently.
    """

    def __init__(self, fd: int, gap: Callable[[int], bytes] = _note) -> None:
        self._fd = fd
        self._note = gap
        self._room: tuple[int, int] | None = None
        self._begin()

    def _begin(self) -> None:
        self.pending = 0
        self.error: OSError | None = None
        self.is_broken = False
        self._pid = os.getpid()
        self._lock = allocate_lock()
        self._idle = allocate_lock()  # held while there is a thread
        self._blocks: deque[bytes] = deque()
        self._lost = 0

    def write(self, block: bytes) -> None:
        """Write it soon."""
        if self._pid != os.getpid():  # a forked child has no thread, and the queue is its parent's
            self._begin()
        with self._lock:
            if self.is_broken or not block:
                return
            if self._lost or (self.pending and self.pending + len(block) > MAX_BYTES):
                if not self._lost:
                    self._blocks.append(_GAP)
                self._lost += len(block)
                return
            self._blocks.append(block)
            self.pending += len(block)
        self._start()

    def flush(self, wait_s: float) -> bool:
        """Wait until all is written; False if the reader takes nothing for `wait_s`.

        The rest stays in the queue.
        """
        while True:
            before = self.pending
            if self._idle.acquire(timeout=wait_s):
                self._idle.release()
                if not self._blocks:
                    return True
                self._start()  # an item arrived while the old thread was ending
            elif self.pending >= before:
                return False

    def tell_room(self, low_bytes: int) -> int:
        """A descriptor (an eventfd) that becomes readable when at most that many bytes wait."""
        fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._room = (fd, low_bytes)
        return fd

    def forget_room(self) -> None:
        """Close that descriptor."""
        with self._lock:
            room, self._room = self._room, None
        if room is not None:
            os.close(room[0])

    # The thread.

    def _start(self) -> None:
        with self._lock:
            if not self._blocks or not self._idle.acquire(blocking=False):
                return
        try:
            start_new_thread(self._run, ())
        except RuntimeError:  # no threads any more: the interpreter ends
            self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                data = self._take()
                if data is None:
                    self._idle.release()
                    return
            try:
                self._write_all(data)
            except OSError as error:
                self._failed(error)

    def _take(self) -> bytes | None:
        """The next blocks, or the note of a gap; None if there is nothing."""
        if not self._blocks:
            return None
        if self._blocks[0] is _GAP:
            self._blocks.popleft()
            lost, self._lost = self._lost, 0
            note = self._note(lost)
            self.pending += len(note)
            return note
        size = 0
        blocks = []
        while self._blocks and self._blocks[0] is not _GAP and size < _CHUNK_BYTES:
            blocks.append(self._blocks.popleft())
            size += len(blocks[-1])
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        done = 0
        try:
            while done < len(view):
                try:
                    count = os.write(self._fd, view[done : done + _CHUNK_BYTES])
                except BlockingIOError:  # another user of the stream has set it non-blocking
                    poll = select.poll()
                    poll.register(self._fd, select.POLLOUT)
                    poll.poll(1000)
                    continue
                done += count
                self._wrote(count)
        finally:
            self._wrote(len(view) - done)

    def _wrote(self, count: int) -> None:
        with self._lock:
            before, self.pending = self.pending, self.pending - count
            if self._room is not None and self.pending <= self._room[1] < before:
                os.eventfd_write(self._room[0], 1)

    def _failed(self, error: OSError) -> None:
        self.error = error
        if error.errno in _PASSES:
            return
        with self._lock:
            self.is_broken = True
            self._blocks.clear()
            self._lost = 0
            if self._room is not None:
                os.eventfd_write(self._room[0], 1)
            self.pending = 0


STDERR = Sink(2)
atexit.register(STDERR.flush, _LAST_WORDS_S)
