"""What happened in a job, for programs: one JSON object per event and line (docs/events.md).

A journal that cannot be written is reported once, and the job goes on.
"""

from __future__ import annotations

import json
import os
import time

from rallypoint.base.errors import HostError
from rallypoint.launch.job import Job
from rallypoint.launch.terminal import print_line, say


class Journal:
    """Writes to a file, to stderr, or both.

    Raises:
        HostError: the file cannot be opened.
    """

    def __init__(self, job: Job) -> None:
        self._run_id = job.run_id
        self.node_rank = job.nodes.node_rank
        self._is_on_stderr = job.prints_events
        self._path = job.events_file
        self._fd = -1
        if self._path:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o666)
            except OSError as error:
                raise HostError(
                    f"cannot open {self._path}: {error.strerror}; give another file with"
                    " --json-events."
                ) from None

    def record(self, event: str, fields: dict[str, object]) -> None:
        """Write one event."""
        head = {"time": time.time(), "event": event, "run_id": self._run_id}
        text = json.dumps({**head, "node_rank": self.node_rank, **fields})
        if self._is_on_stderr:
            print_line(text)
        if self._fd < 0:
            return
        data = text.encode() + b"\n"
        try:
            # In one piece, so that several agents can share a file.
            if os.write(self._fd, data) == len(data):
                return
            reason = "no space left"
        except OSError as error:
            reason = str(error.strerror)
        say(f"cannot write {self._path}: {reason}; the job goes on, its further events are lost.")
        self.close()

    def close(self) -> None:
        """No more events."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
