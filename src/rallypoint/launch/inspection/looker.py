"""Has a process of its own look at this agent's node; __main__.py is that process."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from rallypoint.launch.inspection.requests import Conversations, Reply

_CHUNK = 1 << 16
_MAX_BYTES = 8 << 20


class Looker:
    """Looks once at a time: who asks meanwhile is told the same."""

    def __init__(self, selector: selectors.BaseSelector, conversations: Conversations) -> None:
        self._selector = selector
        self._conversations = conversations
        self._replies: list[Reply] = []
        self._output = -1
        self._data = b""
        self._pid = 0

    def look(self, reply: Reply, *words: str) -> None:
        """Look, and reply with what was seen; `words` are for the process that looks."""
        self._replies.append(reply)
        if len(self._replies) == 1:
            try:
                self._start(words)
            except OSError as error:
                self._tell({"trouble": f"cannot start a process to look: {error.strerror}"})

    def close(self) -> None:
        """End it."""
        if self._output >= 0:
            self._selector.unregister(self._output)
            os.close(self._output)
            self._output = -1
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _start(self, more: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        output, their_output = os.pipe()
        ours.setblocking(False)
        os.set_blocking(output, False)
        words = [sys.executable, "-P", "-m", "rallypoint.launch.inspection", *more]
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                words,
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_DUP2, their_output, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
            )
        except OSError:
            ours.close()
            os.close(output)
            raise
        finally:
            theirs.close()
            os.close(their_output)
        self._conversations.begin(ours)
        self._output, self._data = output, b""
        self._selector.register(output, selectors.EVENT_READ, self._read)

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
            seen = json.loads(self._data)
        except (ValueError, RecursionError):
            seen = None
        is_whole = isinstance(seen, dict)
        self._tell(seen if is_whole else {"trouble": "the process that looks has ended early"})

    def _tell(self, seen: dict[str, object]) -> None:
        replies, self._replies = self._replies, []
        for reply in replies:
            with suppress(Exception):  # no question may ever end a job
                reply(seen)
