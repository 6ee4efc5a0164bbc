"""A child process that inspects for an agent, and writes its findings as one JSON object.

The agent has one thread, which must not wait for that long.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
from collections.abc import Callable, Sequence

from rallypoint.launch.job import TOKEN

_CHUNK = 1 << 16
_MAX_BYTES = 8 << 20

Heard = Callable[[dict[str, object] | None], None]


class Child:
    """One such process: `python -m rallypoint.launch.inspection WORDS`.

    Args:
        stdin: its standard input, or None.
        heard: called once with its output; None: it ended without output.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        words: Sequence[str],
        heard: Heard,
        *,
        stdin: int | None = None,
    ) -> None:
        self._selector = selector
        self._heard = heard
        self._data = b""
        self._output, their_output = os.pipe()
        os.set_blocking(self._output, False)
        nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-m", "rallypoint.launch.inspection", *words],
                {name: value for name, value in os.environ.items() if name != TOKEN},
                file_actions=[
                    nothing if stdin is None else (os.POSIX_SPAWN_DUP2, stdin, 0),
                    (os.POSIX_SPAWN_DUP2, their_output, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
            )
        except OSError:
            os.close(self._output)
            raise
        finally:
            os.close(their_output)
        selector.register(self._output, selectors.EVENT_READ, self._read)

    def close(self) -> None:
        """End it."""
        if self._output >= 0:
            self._selector.unregister(self._output)
            os.close(self._output)
            self._output = -1
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _read(self) -> None:
        try:
            part = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        self._data += part
        if part and len(self._data) <= _MAX_BYTES:
            return
        self.close()
        try:
            said = json.loads(self._data)
        except (ValueError, RecursionError):
            said = None
        self._heard(said if isinstance(said, dict) else None)
