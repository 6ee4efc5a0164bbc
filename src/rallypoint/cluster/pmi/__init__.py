"""The rendezvous of processes that mpirun, srun or similar started, without Rallypoint's launcher.

meeting.py       rank 0's store and the way to it: Meeting
pmi.py, pmix.py  the launcher passes on a text of rank 0
Waiting          limits how long a process waits for the others of its job, and reports the wait
"""

from __future__ import annotations

import time
from datetime import timedelta

from rallypoint.base.errors import StoreTimeoutError
from rallypoint.store.init_method import REPORT_EVERY, to_stderr


class Waiting:
    """A time limit, and a message every 10 s, from the process that `speaks`, about `whom`."""

    def __init__(self, timeout: timedelta, whom: str, *, speaks: bool) -> None:
        self._timeout_s = timeout.total_seconds()
        self._start = self._said = time.monotonic()
        self._whom = whom
        self._speaks = speaks

    @property
    def left_s(self) -> float:
        """The time until the limit; may be negative."""
        return self._start + self._timeout_s - time.monotonic()

    @property
    def slice_s(self) -> float:
        """How long to wait before the next `check`."""
        return max(min(self.left_s, REPORT_EVERY.total_seconds()), 0.001)

    def check(self) -> None:
        """Note that no process has arrived yet."""
        now = time.monotonic()
        line = f"waited {now - self._start:.0f} s for {self._whom}"
        if self.left_s <= 0:
            raise StoreTimeoutError(
                f"{line}; look for their first error", operation="init_process_group"
            )
        if self._speaks and now - self._said >= REPORT_EVERY.total_seconds():
            self._said = now
            to_stderr(line)
