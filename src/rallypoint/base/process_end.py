"""The end of a process that need not be a child, as something to wait for.

A pidfd reports it. Where the kernel has none (before 5.3), a sandbox refuses them, or Python was
built without them, a thread looks at the process in /proc ten times in a second.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

_PROC = "/proc"
_LOOK_S = 0.1


class ProcessEnd:
    """Its descriptor becomes readable once the process has ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_pidfd = True
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (OSError, AttributeError):
            self._is_pidfd = False
            if not _has_number(pid):
                raise ProcessLookupError from None
            self._started = start_of(pid) or b""
            self._descriptor = self._watch()

    def _watch(self) -> int:
        from threading import Thread

        reader, writer = os.pipe()

        def look() -> None:
            while is_running(self._pid, self._started):
                time.sleep(_LOOK_S)
            os.close(writer)

        Thread(target=look, name="rallypoint-process-end", daemon=True).start()
        return reader

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._descriptor

    def wait(self, wait_s: float | None = None) -> bool:
        """Wait for the end, at most this long; returns whether it has come."""
        poll = select.poll()  # unlike select, for any number of a descriptor
        poll.register(self._descriptor, select.POLLIN)
        return bool(poll.poll(None if wait_s is None else max(0.0, wait_s) * 1000))

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        with suppress(ProcessLookupError):
            if self._is_pidfd:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            elif is_running(self._pid, self._started):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._descriptor)


def start_of(pid: int) -> bytes | None:
    """When a process began, in the kernel's unit, to distinguish it from a later process with the
    same pid.

    None: it has ended. Empty: that cannot be seen (there is no /proc, it is another user's, or no
    descriptor is left).
    """
    try:
        fields = Path(f"{_PROC}/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return b"" if _has_number(pid) else None
    state, start = fields[0], fields[19]
    return None if state in (b"Z", b"X") else start


def is_running(pid: int, started: bytes) -> bool:
    """Whether the process still runs that began then, as `start_of` said."""
    start = start_of(pid)
    return start is not None and (start == started or not start or not started)


def _has_number(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
