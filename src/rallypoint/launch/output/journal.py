"""The events of a job, for programs: one JSON object per event and line (docs/events.md).

If the journal cannot be written, that is reported once, and the job continues; if its file system
hangs, nothing waits for it (sink.py).
"""

from __future__ import annotations

import json
import os
import time

from rallypoint.base.errors import HostError
from rallypoint.launch.job import Job
from rallypoint.launch.output.sink import Sink
from rallypoint.launch.output.terminal import print_line, say

_PATIENCE_S = 2.0


class Journal:
    """Writes to a file, to stderr, or both."""

    def __init__(self, job: Job) -> None:
        self._run_id = job.run_id
        self.node_rank = job.nodes.node_rank
        self._is_on_stderr = job.prints_events
        self._path = job.events_file
        self._sink: Sink | None = None
        if self._path:
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o666)
                # Each event is written in one piece, so that several agents can share a file.
                self._sink = Sink(self._fd, gap=_note_of_gap)
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
        self._check()
        if self._sink is not None:
            self._sink.write(text.encode() + b"\n")

    def close(self) -> None:
        """End the journal."""
        if self._sink is not None and self._sink.flush(_PATIENCE_S):
            self._check()
            os.close(self._fd)
        self._sink = None

    def _check(self) -> None:
        """Report if something could not be written, and give up."""
        if self._sink is not None and self._sink.error is not None:
            say(
                f"cannot write {self._path}: {self._sink.error.strerror}; the job continues, but"
                " further events are lost."
            )
            self._sink = None


def _note_of_gap(lost: int) -> bytes:
    return json.dumps({"time": time.time(), "event": "lost", "bytes": lost}).encode() + b"\n"
