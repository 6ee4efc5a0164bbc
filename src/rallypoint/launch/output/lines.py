"""Workers' output on its way through the agent: whole lines, each with its worker's prefix.

    worker stdout --pipe--> LineReader --lines--> Outlet --> the agent's stdout

Rules: a line is never split by another worker's. The agent never waits for a slow reader: when an
outlet is full, it stops reading the pipes, so the workers wait instead. What dead workers left is
read at once, because the next round cannot wait; only of that, something may be lost (sink.py).
"""

from __future__ import annotations

import os
import selectors
from collections import deque

from rallypoint.launch.output.file_work import FileWork
from rallypoint.launch.output.sink import STDERR, Sink
from rallypoint.launch.output.terminal import STATUS

TYPE_CHECKING = False  # importing typing would cost each launch 4 ms
if TYPE_CHECKING:
    from typing import Protocol

    class Rest(Protocol):
        """Output of a dead worker that is still in a file."""

        def show_rest(self) -> bool:
            """Give the outlet what it accepts; returns whether nothing is left."""


_READ_BYTES = 64 << 10
LATEST_BYTES = 4 << 10
MAX_LINE_BYTES = 1 << 20  # longer lines are split, so that memory is bounded
_MAX_PIPE_BYTES = 1 << 20  # the kernel's limit for ordinary users
_FULL_BYTES = 256 << 10
_LOW_BYTES = 64 << 10


class Outlet:
    """One of the agent's output streams. It accepts bytes at once and writes them when it can."""

    def __init__(
        self, fd: int, sink: Sink, selector: selectors.BaseSelector, files: FileWork
    ) -> None:
        self.readers: list[StreamReader] = []
        self._sink = sink
        self._selector = selector
        self._files = files
        self._rests: deque[Rest] = deque()  # of dead workers; shown before anything of the living
        self._is_showing_rests = False
        self._is_sink_full = False
        self._announced_full = False
        self._is_terminal = os.isatty(fd)
        self._room = sink.tell_room(_LOW_BYTES)
        selector.register(self._room, selectors.EVENT_READ, self._has_room)

    @property
    def is_full(self) -> bool:
        """Whether readers should hold back."""
        return self._is_sink_full or bool(self._rests)

    def has_room_for(self, reader: object) -> bool:
        """Whether a reader may give more; dead workers are shown one after the other."""
        return not self._is_sink_full and (not self._rests or self._rests[0] is reader)

    def write(self, data: bytes) -> None:
        """Accept whole lines."""
        if self._is_terminal:
            STATUS.hide()
        self._sink.write(data)
        self.update()

    def show_rest(self, rest: Rest) -> None:
        """Show what is waiting in its file, as soon as there is room."""
        self._rests.append(rest)
        self.update()

    def flush(self, wait_s: float) -> bool:
        """Write everything; False if the reader takes nothing for `wait_s`: the rest is dropped."""
        while self._sink.flush(wait_s):
            if not self._rests:
                return True
            self.update()
            if self._rests and not self._files.flush(wait_s):
                break
        return False

    def close(self) -> None:
        """No more output will come."""
        self._selector.unregister(self._room)
        self._sink.forget_room()

    def _has_room(self) -> None:
        os.eventfd_read(self._room)
        self.update()

    def update(self) -> None:
        """Continue with what dead workers left, and notify readers whether there is room."""
        if self._is_showing_rests:
            return
        self._measure()
        self._is_showing_rests = True
        while self._rests and not self._is_sink_full:
            if not self._rests[0].show_rest():
                break  # it waits for its file, or for room, and continues by itself
            self._rests.popleft()
            self._measure()
        self._is_showing_rests = False
        if self.is_full != self._announced_full:
            self._tell_readers(self.is_full)

    def _measure(self) -> None:
        limit = _LOW_BYTES if self._is_sink_full else _FULL_BYTES
        self._is_sink_full = self._sink.pending > limit

    def _tell_readers(self, is_full: bool) -> None:
        self._announced_full = is_full
        self.readers[:] = self.readers[1:] + self.readers[:1]  # another reader is first next time
        for reader in tuple(self.readers):
            reader.pause(is_full)
            if self._announced_full != is_full:
                break  # this reader's data has filled it again, and all have been notified


class Lines:
    """Cuts one worker's output into blocks of whole lines.

    A carriage return ends a line too, as for torchrun; otherwise a progress bar would not show
    until its end.
    """

    def __init__(self) -> None:
        self._partial = b""

    def take(self, data: bytes) -> bytes:
        """The whole lines so far; empty if there are none."""
        data = self._partial + data
        self._partial = b""
        if b"\r" in data:
            if data.endswith(b"\r"):  # a newline may follow
                data, self._partial = data[:-1], b"\r"
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        cut = data.rfind(b"\n") + 1
        self._partial = data[cut:] + self._partial
        if len(self._partial) > MAX_LINE_BYTES:
            return data[:cut] + self.rest()
        return data[:cut]

    def rest(self) -> bytes:
        """The unfinished last line, made whole."""
        rest, self._partial = self._partial.rstrip(b"\r"), b""
        return rest + b"\n" if rest else b""


class StreamReader:
    """Reads a descriptor as far as its outlet has room. Subclasses give the outlet whole lines."""

    def __init__(self, fd: int, outlet: Outlet, selector: selectors.BaseSelector) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._outlet = outlet
        self._selector = selector
        self._is_open = True
        self._is_listening = False
        outlet.readers.append(self)
        self._listen(True)

    def read(self) -> None:
        """Read what has been written."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        self._take_or_close(data)

    def finish(self) -> None:
        """All writers are dead: read all that is left."""
        left = _MAX_PIPE_BYTES  # a process that cannot be killed may continue writing
        while self._is_open:
            try:
                data = os.read(self._fd, _READ_BYTES) if left > 0 else b""
            except BlockingIOError:
                data = b""
            left -= len(data)
            self._take_or_close(data)

    def pause(self, paused: bool) -> None:
        """Read nothing while the outlet is full, or continue."""
        self._listen(self._is_open and not paused)

    def close(self) -> None:
        """Pass on an unfinished last line, and stop listening."""
        if not self._is_open:
            return
        self._listen(False)
        self._is_open = False
        os.close(self._fd)
        self._outlet.readers.remove(self)
        self._give(self._rest())

    def _take_or_close(self, data: bytes) -> None:
        if data:
            self._take(data)
        else:
            self.close()

    def _take(self, data: bytes) -> None:
        raise NotImplementedError

    def _rest(self) -> bytes:
        """The unfinished last line."""
        raise NotImplementedError

    def _give(self, block: bytes) -> None:
        if block:
            self._outlet.write(block)

    def _listen(self, wanted: bool) -> None:
        if wanted and not self._is_listening:
            self._selector.register(self._fd, selectors.EVENT_READ, self.read)
        elif self._is_listening and not wanted:
            self._selector.unregister(self._fd)
        self._is_listening = wanted


class LineReader(StreamReader):
    """The agent's end of one worker's stdout or stderr, whose lines get a prefix."""

    def __init__(self, outlet: Outlet, prefix: str, selector: selectors.BaseSelector) -> None:
        fd, self.worker_fd = os.pipe()
        self.prefix = prefix
        self.latest = b""  # the latest lines
        self._lines = Lines()
        super().__init__(fd, outlet, selector)

    def _take(self, data: bytes) -> None:
        self._give(self._lines.take(data))

    def _rest(self) -> bytes:
        return self._lines.rest()

    def _give(self, block: bytes) -> None:
        if block:
            self.latest = block[-LATEST_BYTES:]
            self._outlet.write(with_prefix(block, os.fsencode(self.prefix)))


def with_prefix(block: bytes, prefix: bytes) -> bytes:
    """Whole lines, each with the prefix."""
    return prefix + block[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def open_outlets(selector: selectors.BaseSelector, files: FileWork) -> tuple[Outlet, Outlet]:
    """Outlets for stdout and stderr; one and the same if both lead to the same place."""
    try:
        same = os.path.samestat(os.fstat(1), os.fstat(2))
    except OSError:
        same = False
    err = Outlet(2, STDERR, selector, files)
    return err if same else Outlet(1, Sink(1), selector, files), err
