"""One worker's stream that goes to a file and, behind a prefix, to the launcher's own stream.

    worker --pipe--> file --where the outlet has room--> outlet
                       \\--lines with certain texts--> one more file, for all workers

The file comes first and is also the buffer: a slow terminal delays what it shows, never the worker,
and little is held in memory. When the file cannot be written, the stream continues without it, and
then it is the reader that workers wait for; where a file system hangs, workers wait for that. The
agent never does: file_work.py writes and reads. See docs/decisions/016-logs.md.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Sequence
from functools import partial

from rallypoint.launch.output.file_work import FileWork
from rallypoint.launch.output.lines import LineReader, Outlet

_BLOCK_BYTES = 256 << 10
_MOST_UNWRITTEN = 4 << 20  # limit if a file system hangs, and no process waits for it


class FilteredFile:
    """Lines of all workers that contain one of some texts."""

    def __init__(
        self,
        path: str,
        texts: Sequence[str],
        files: FileWork,
        failed: Callable[[str, OSError], None],
    ) -> None:
        self._path = path
        self._texts = [os.fsencode(text) for text in texts]
        self._files = files
        self._failed = failed
        self._fd = files.call(lambda: open_log(path))
        self._users = 1
        self._unwritten = 0
        self._is_broken = False

    def use(self) -> FilteredFile:
        """Register one more user, which must also `close` it."""
        self._users += 1
        return self

    def take(self, block: bytes, prefix: bytes) -> None:
        """Write the matching lines of the block, with the prefix."""
        if self._is_broken or not any(text in block for text in self._texts):
            return
        lines = block.splitlines(keepends=True)
        found = b"".join(
            [prefix + line for line in lines if any(text in line for text in self._texts)]
        )
        if self._unwritten + len(found) <= _MOST_UNWRITTEN:
            self._unwritten += len(found)
            self._files.do(partial(write_all, self._fd, found), partial(self._wrote, len(found)))

    def close(self) -> None:
        """No more lines from one of its users."""
        self._users -= 1
        if not self._users:
            self._files.do(partial(os.close, self._fd), lambda _: None)

    def _wrote(self, count: int, result: tuple[int, OSError | None] | OSError) -> None:
        self._unwritten -= count
        error = result if isinstance(result, OSError) else result[1]
        if error is not None and not self._is_broken:
            self._is_broken = True
            self._failed(self._path, error)


class Tee(LineReader):
    """The agent's end of a stream that also goes to a file."""

    def __init__(
        self,
        outlet: Outlet,
        prefix: str,
        selector: selectors.BaseSelector,
        *,
        path: str,
        files: FileWork,
        filtered: FilteredFile | None,
        failed: Callable[[str, OSError], None],
    ) -> None:
        self._path = path
        self._files = files
        self._file = files.call(lambda: open_log(path))  # first, because it may fail
        self._filtered = None if filtered is None else filtered.use()
        self._failed = failed
        self._written = self._shown = 0
        self._unwritten = b""
        self._unshown = b""  # data that a broken file did not accept, until the outlet has room
        self._is_file_broken = False
        self._is_busy = False  # the file is being written or read
        self._is_rest = False  # its worker is dead
        super().__init__(outlet, prefix, selector)

    def finish(self) -> None:
        """Read all that is left; what is waiting in the file is shown when there is room for it."""
        super().finish()
        self._is_rest = True
        self._outlet.readers.remove(self)
        self._outlet.show_rest(self)

    def show_rest(self) -> bool:
        """Show more of it; True once nothing is left, and the files are closed."""
        self._proceed()
        if self._is_busy or self._unwritten or self._shown < self._written:
            return False
        self._give(self._lines.take(self._unshown) + self._lines.rest())
        self._unshown = b""
        if self._filtered is not None:
            self._filtered.close()
        self._files.do(partial(os.close, self._file), lambda _: None)
        return True

    def pause(self, paused: bool) -> None:
        self._proceed()

    def close(self) -> None:
        """The worker's end is closed; what is waiting in the file stays for `finish`."""
        if self._is_open:
            self._listen(False)
            self._is_open = False
            os.close(self._fd)
            self._proceed()

    def _take(self, data: bytes) -> None:
        self._unwritten += data
        self._proceed()

    def _proceed(self) -> None:
        """Write, otherwise show, as far as the file and the outlet allow."""
        if self._is_file_broken:
            self._unshown += self._unwritten
            self._unwritten = b""
        if not self._is_busy and self._unwritten:
            data, self._unwritten = self._unwritten, b""
            self._is_busy = True
            self._files.do(partial(write_all, self._file, data), partial(self._wrote, data))
        elif not self._is_busy and self._outlet.has_room_for(self):
            if self._shown < self._written:
                size = min(_BLOCK_BYTES, self._written - self._shown)
                self._is_busy = True
                self._files.do(
                    lambda: os.pread(self._file, size, self._shown), self._have_read_back
                )
            elif self._unshown:
                data, self._unshown = self._unshown, b""
                self._give(self._lines.take(data))
        # Without a file, the worker has to wait for the reader.
        must_wait = self._is_file_broken and (self._unshown or self._outlet.is_full)
        is_behind = len(self._unwritten) >= _BLOCK_BYTES
        self._listen(self._is_open and not must_wait and not is_behind)

    def _wrote(self, data: bytes, result: tuple[int, OSError | None] | OSError) -> None:
        """Show what the file accepted, if that is next; keep the rest."""
        count, error = (0, result) if isinstance(result, OSError) else result
        self._is_busy = False
        is_next = self._shown == self._written
        self._written += count
        if error is not None:
            self._is_file_broken = True
            self._failed(self._path, error)
            self._unshown = data[count:] + self._unshown
        if is_next and self._outlet.has_room_for(self):
            self._shown = self._written
            self._give(self._lines.take(data[:count]))
        self._after_file_work()

    def _have_read_back(self, data: bytes | OSError) -> None:
        self._is_busy = False
        if isinstance(data, OSError) or not data:  # another process has truncated the file
            self._shown = self._written
        else:
            self._shown += len(data)
            self._give(self._lines.take(data))
        self._after_file_work()

    def _after_file_work(self) -> None:
        if self._is_rest:
            self._outlet.update()
        else:
            self._proceed()

    def _give(self, block: bytes) -> None:
        if block and self._filtered is not None:
            self._filtered.take(block, os.fsencode(self.prefix))
        super()._give(block)


def open_log(path: str) -> int:
    """A new file. Everyone appends to it, also after someone has truncated it."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)


def write_all(fd: int, data: bytes) -> tuple[int, OSError | None]:
    """Write, in several steps if necessary; returns how much, and the error after that."""
    count = 0
    while count < len(data):
        try:
            count += os.write(fd, data[count:])
        except OSError as error:
            return count, error
    return count, None
