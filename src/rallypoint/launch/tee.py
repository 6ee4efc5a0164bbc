"""One worker's stream that goes to a file and, behind a prefix, to the launcher's own stream.

    worker --pipe--> file --where the outlet has room--> outlet
                       \\--lines with certain texts--> one more file, for all workers

The file comes first and is also the buffer: a slow terminal delays what it shows, never the worker,
and nothing is held in memory. When the file cannot be written, the stream goes on without it, and
then it is the reader that workers wait for. See docs/decisions/016-logs.md.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence

from rallypoint.launch.logs import LineReader, Outlet

_BLOCK_BYTES = 256 << 10


class FilteredFile:
    """Lines of all workers that contain one of some texts."""

    def __init__(
        self, path: str, texts: Sequence[str], failed: Callable[[str, OSError], None]
    ) -> None:
        self._path = path
        self._texts = [os.fsencode(text) for text in texts]
        self._failed = failed
        self._fd = open_log(path)

    def take(self, block: bytes, prefix: bytes) -> None:
        """Write those lines of the block, behind the prefix."""
        if self._fd < 0 or not any(text in block for text in self._texts):
            return
        lines = block.splitlines(keepends=True)
        found = [prefix + line for line in lines if any(text in line for text in self._texts)]
        try:
            write_all(self._fd, b"".join(found))
        except OSError as error:
            self._failed(self._path, error)
            self.close()

    def close(self) -> None:
        """No more lines."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Tee(LineReader):
    """The agent's end of such a stream."""

    def __init__(
        self,
        outlet: Outlet,
        prefix: str,
        selector: selectors.BaseSelector,
        *,
        path: str,
        filtered: FilteredFile | None,
        failed: Callable[[str, OSError], None],
    ) -> None:
        self._path = path
        self._file = open_log(path)  # first: it may fail
        self._filtered = filtered
        self._failed = failed
        self._written = self._shown = 0
        self._held = b""  # what a broken file did not take, until the outlet has room
        self._is_file_broken = False
        super().__init__(outlet, prefix, selector)

    def finish(self, patience_s: float | None) -> None:
        """See LineReader; and show what waits in the file."""
        super().finish(patience_s)
        while self._shown < self._written:
            self._show_next()
            self._outlet.flush(patience_s)
        self._give(self._lines.take(self._held) + self._lines.rest())
        self._held = b""
        if self._file >= 0:
            self._outlet.readers.remove(self)
            os.close(self._file)
            self._file = -1

    def pause(self, paused: bool) -> None:
        """See LineReader."""
        self._show()

    def close(self) -> None:
        """The worker's end is closed; what waits in the file stays for `finish`."""
        if self._is_open:
            self._listen(False)
            self._is_open = False
            os.close(self._fd)
            self._show()

    def _take(self, data: bytes) -> None:
        self._held += data if self._is_file_broken else self._write(data)
        self._show()

    def _show(self) -> None:
        while self._shown < self._written and not self._outlet.is_full:
            self._show_next()
        if self._is_file_broken:
            if self._shown == self._written:
                held, self._held = self._held, b""
                self._give(self._lines.take(held))
            # Without a file, the worker has to wait for the reader.
            self._listen(self._is_open and not self._held and not self._outlet.is_full)

    def _write(self, data: bytes) -> bytes:
        """Write to the file; what it did not take comes back."""
        while data:
            try:
                count = os.write(self._file, data)
            except OSError as error:
                self._is_file_broken = True
                self._failed(self._path, error)
                break
            self._written += count
            data = data[count:]
        return data

    def _show_next(self) -> None:
        size = min(_BLOCK_BYTES, self._written - self._shown)
        data = os.pread(self._file, size, self._shown)
        if not data:  # someone has truncated the file
            self._shown = self._written
            return
        self._shown += len(data)
        self._give(self._lines.take(data))

    def _give(self, block: bytes) -> None:
        if block and self._filtered is not None:
            self._filtered.take(block, self._prefix)
        super()._give(block)


def open_log(path: str) -> int:
    """A new file. Whoever writes to it appends, also after someone has truncated it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)


def write_all(fd: int, data: bytes) -> None:
    """Write, also if it takes several steps."""
    while data:
        data = data[os.write(fd, data) :]
