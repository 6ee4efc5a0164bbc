"""Workers' output on its way through the agent: whole lines, each behind its worker's prefix.

    worker stdout --pipe--> LineReader --lines--> Outlet --> the agent's stdout

Rules: a line is never torn by another worker's; nothing is lost; the agent never blocks on a slow
reader: an outlet that is full makes it stop reading the pipes, and so the workers wait, not it.
"""

from __future__ import annotations

import os
import select
import selectors
from collections.abc import Callable

_READ_BYTES = 64 << 10
_MAX_LINE_BYTES = 1 << 20  # a longer line is broken, rather than held in memory without end
_PIPE_BUF = 4096  # what poll promises a pipe can take without blocking
_FULL_BYTES = 256 << 10
_LOW_BYTES = 64 << 10

Callback = Callable[[], None]


class Outlet:
    """One of the agent's own output streams. It takes bytes at once and writes them when it can."""

    def __init__(self, fd: int, selector: selectors.BaseSelector) -> None:
        self.readers: list[LineReader] = []
        self._fd = fd
        self._selector = selector
        self._pending = bytearray()
        self._is_registered = False
        self._is_broken = False
        self._can_wait = True

    def write(self, data: bytes) -> None:
        """Queue `data`, and write what can be written now."""
        if self._is_broken:
            return  # nobody reads; the workers' output is dropped, the job goes on
        self._pending += data
        self._write_some()

    def flush(self, patience_s: float | None) -> None:
        """Write everything; drop it if the reader takes nothing for `patience_s` (None: never)."""
        while self._pending and not self._is_broken:
            if self._can_wait and not self._is_writable(patience_s):
                self._break()
            else:
                self._write_chunk(_PIPE_BUF if self._can_wait else len(self._pending))
        self._update()

    def _write_some(self) -> None:
        while self._pending and not self._is_broken and self._is_writable(0):
            # Files never block, and cannot be waited for.
            self._write_chunk(_PIPE_BUF if self._can_wait else len(self._pending))
        self._update()

    def _is_writable(self, timeout_s: float | None) -> bool:
        if not self._can_wait:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def _write_chunk(self, size: int) -> None:
        try:
            written = os.write(self._fd, memoryview(self._pending)[:size])
        except BlockingIOError:  # the stream is set so by someone who shares it
            self._is_writable(1.0)
            return
        except OSError:
            self._break()
            return
        del self._pending[:written]

    def _break(self) -> None:
        self._is_broken = True
        self._pending.clear()

    def _update(self) -> None:
        if bool(self._pending) != self._is_registered:
            if self._is_registered:
                self._selector.unregister(self._fd)
            else:
                try:
                    self._selector.register(self._fd, selectors.EVENT_WRITE, self._write_some)
                except PermissionError:  # epoll's answer for a file
                    self._can_wait = False
                    return self._write_some()
            self._is_registered = not self._is_registered
        for reader in self.readers:
            reader.pause(len(self._pending) > (_LOW_BYTES if reader.is_paused else _FULL_BYTES))
        return None


class LineReader:
    """The agent's end of one worker's stdout or stderr."""

    def __init__(self, outlet: Outlet, prefix: str, selector: selectors.BaseSelector) -> None:
        self._fd, self.worker_fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._outlet = outlet
        self._prefix = os.fsencode(prefix)
        self._selector = selector
        self._partial = b""
        self._is_open = True
        self.is_paused = False
        outlet.readers.append(self)
        selector.register(self._fd, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """Take what the worker has written."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._take(data)
        else:
            self.close()

    def finish(self, patience_s: float | None) -> None:
        """All writers are dead: take all that is left, and wait for the outlet as `flush` does."""
        while self._is_open:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                data = b""  # someone who cannot be killed holds the other end
            if data:
                self._take(data)
                self._outlet.flush(patience_s)
            else:
                self.close()

    def pause(self, paused: bool) -> None:
        """Stop or resume listening to the worker."""
        if paused == self.is_paused or not self._is_open:
            return
        self.is_paused = paused
        if paused:
            self._selector.unregister(self._fd)
        else:
            self._selector.register(self._fd, selectors.EVENT_READ, self.read)

    def close(self) -> None:
        """Give out an unfinished last line, and stop listening."""
        if not self._is_open:
            return
        if not self.is_paused:
            self._selector.unregister(self._fd)
        self._is_open = False
        os.close(self._fd)
        self._outlet.readers.remove(self)
        if self._partial:
            self._outlet.write(self._prefix + self._partial + b"\n")

    def _take(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _MAX_LINE_BYTES:
            lines.append(self._partial)
            self._partial = b""
        if lines:
            self._outlet.write(b"".join(self._prefix + line + b"\n" for line in lines))


def open_outlets(selector: selectors.BaseSelector) -> tuple[Outlet, Outlet]:
    """Outlets for stdout and stderr: one and the same if both lead to the same place."""
    out = Outlet(1, selector)
    try:
        same = os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        same = False
    return out, out if same else Outlet(2, selector)
