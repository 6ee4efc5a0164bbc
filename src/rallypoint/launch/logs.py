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

from rallypoint.launch.terminal import STATUS

_READ_BYTES = 64 << 10
_MAX_LINE_BYTES = 1 << 20  # a longer line is broken, rather than held in memory without end
_PIPE_BUF = 4096  # what poll promises a pipe can take without blocking
_FULL_BYTES = 256 << 10
_LOW_BYTES = 64 << 10
_NEWLINE = 10

Callback = Callable[[], None]


class Outlet:
    """One of the agent's own output streams. It takes bytes at once and writes them when it can."""

    def __init__(self, fd: int, selector: selectors.BaseSelector) -> None:
        self.readers: list[LineReader] = []
        self._fd = fd
        self._selector = selector
        self._pending = bytearray()
        self.is_full = False
        self._is_registered = False
        self._is_broken = False
        self._can_wait = True
        self._is_terminal = os.isatty(fd)

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
        if self._is_terminal:
            STATUS.hide()
        try:
            written = os.write(self._fd, memoryview(self._pending)[:size])
        except BlockingIOError:  # the stream is set so by someone who shares it
            self._is_writable(1.0)
            return
        except OSError:
            self._break()
            return
        if self._is_terminal and written:
            STATUS.may_show = self._pending[written - 1] == _NEWLINE
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
        is_full = len(self._pending) > (_LOW_BYTES if self.is_full else _FULL_BYTES)
        if is_full != self.is_full:
            self.is_full = is_full
            self.readers[:] = self.readers[1:] + self.readers[:1]  # another one is first next time
            for reader in tuple(self.readers):
                reader.pause(is_full)
                if self.is_full != is_full:
                    break  # what this reader had has filled it again, and all have been told
        return None


class Lines:
    """Cuts one worker's output into blocks of whole lines.

    A carriage return ends a line too, as for torchrun: else a progress bar would not show until
    its end.
    """

    def __init__(self) -> None:
        self._partial = b""

    def take(self, data: bytes) -> bytes:
        """What is whole now; empty if nothing is."""
        data = self._partial + data
        self._partial = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # a newline may follow
                data, self._partial = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        cut = data.rfind(b"\n") + 1
        self._partial = data[cut:] + self._partial
        if len(self._partial) > _MAX_LINE_BYTES:
            return data[:cut] + self.rest()
        return data[:cut]

    def rest(self) -> bytes:
        """The unfinished last line, made whole."""
        rest, self._partial = self._partial.rstrip(b"\r"), b""
        return rest + b"\n" if rest else b""


class LineReader:
    """The agent's end of one worker's stdout or stderr, whose lines get a prefix."""

    def __init__(self, outlet: Outlet, prefix: str, selector: selectors.BaseSelector) -> None:
        self._fd, self.worker_fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._outlet = outlet
        self._prefix = os.fsencode(prefix)
        self._selector = selector
        self._lines = Lines()
        self._is_open = True
        self._is_listening = False
        outlet.readers.append(self)
        self._listen(True)

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
        """The outlet is full, or is so no longer."""
        self._listen(self._is_open and not paused)

    def close(self) -> None:
        """Give out an unfinished last line, and stop listening."""
        if not self._is_open:
            return
        self._listen(False)
        self._is_open = False
        os.close(self._fd)
        self._outlet.readers.remove(self)
        self._give(self._lines.rest())

    def _take(self, data: bytes) -> None:
        self._give(self._lines.take(data))

    def _give(self, block: bytes) -> None:
        if block:
            self._outlet.write(with_prefix(block, self._prefix))

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._is_listening:
            self._selector.register(self._fd, selectors.EVENT_READ, self.read)
        elif self._is_listening and not wanted:
            self._selector.unregister(self._fd)
        self._is_listening = wanted


def with_prefix(block: bytes, prefix: bytes) -> bytes:
    """Whole lines, each behind the prefix."""
    return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def open_outlets(selector: selectors.BaseSelector) -> tuple[Outlet, Outlet]:
    """Outlets for stdout and stderr: one and the same if both lead to the same place."""
    out = Outlet(1, selector)
    try:
        same = os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        same = False
    return out, out if same else Outlet(2, selector)
